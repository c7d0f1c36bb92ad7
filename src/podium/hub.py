"""Whether the Hugging Face hub can be reached. Its libraries try again for a minute, in silence, where it cannot."""

import functools
import logging
import os
import sys
from typing import Final

from podium.exceptions import read_text

_TIMEOUT_S: Final = 5.0


def look_for_hub(name: str) -> None:
    """Switch to offline mode, with a warning, if ``name`` is not a path and the hub does not answer.

    A process asks the hub once. Processes that it starts later get the answer.
    """
    if not os.path.exists(os.path.expanduser(name)):
        _look()


def explain_offline(error: BaseException) -> str:
    """Say what to do if ``error`` says that a model or dataset is absent because the hub is offline; "" otherwise.

    A path that exists, and a model or dataset that was downloaded before, raise no such error.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    absent = any(isinstance(cause, ConnectionError | LocalEntryNotFoundError) for cause in causes)
    if not (constants.HF_HUB_OFFLINE and absent):
        return ""
    return (
        "it is not on this machine, and the hub is offline (no network, or HF_HUB_OFFLINE is set): connect to the "
        "network, or give the path of a copy"
    )


@functools.cache
def _look() -> None:
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - of whichever HTTP library huggingface_hub uses
        logging.getLogger(__name__).warning(
            "the hub at %s does not answer (%s): only models and datasets on this machine are used",
            constants.ENDPOINT,
            read_text(error) or type(error).__name__,
        )
        os.environ["HF_HUB_OFFLINE"] = "1"
        for settings in (constants, sys.modules.get("datasets.config")):
            if settings is not None:
                vars(settings)["HF_HUB_OFFLINE"] = True
