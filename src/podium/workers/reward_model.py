"""The reward model: a frozen classifier with one output, which scores completions."""

import itertools
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from podium.data import Batch, fields
from podium.devices import choose_device
from podium.errors import ConfigError, DataError
from podium.models.loading import load_scorer, longrope_threshold
from podium.models.tokenizers import load_tokenizer
from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.reward_encoder import RewardEncoder
from podium.runtime import Worker, concat, endpoint, first, shard
from podium.training.micro_batches import plan

_NO_TOKEN: Final = -1


def load_scorer_encoder(path: str, system_prompt: str) -> RewardEncoder:
    """Return what writes conversations for a reward model, by its own tokenizer and chat template.

    Args:
        path: The model's directory or hub name.
        system_prompt: The system message of conversations without one of their own.

    Raises:
        ConfigError: There is no tokenizer, or it has several chat templates, of which none is called default.
    """
    try:
        tokenizer = load_tokenizer(path)
    except ConfigError as error:
        raise ConfigError(
            f"reward.path = {path!r} has no tokenizer that transformers reads: {error.__cause__}"
        ) from error
    stored: Any = tokenizer.chat_template
    named = cast("dict[str, str]", stored) if isinstance(stored, dict) else {}
    if not named or "default" in named or len(named) == 1:
        template = next(iter(named)) if len(named) == 1 else "auto"
        return RewardEncoder(
            tokenizer, DataConfig(chat_template=template, system_prompt=system_prompt), f"the reward model {path}"
        )
    raise ConfigError(
        f"the tokenizer of reward.path = {path!r} has the chat templates {', '.join(sorted(named))}, and none is "
        "called default: write the one to use into the file chat_template.jinja of its directory, without the others"
    )


class RewardModel(Worker):
    """Scores completions with a sequence-classification model of transformers that has one output.

    The model reads text by its own tokenizer. If the tokenizer has a chat template, prompt and completion form a
    conversation, which the template gets with the tools of the row. Otherwise the completion follows the prompt as the
    policy saw it.

    Args:
        path: The model's directory or hub name.
        system_prompt: The system message of conversations without one of their own.
        max_tokens: A forward pass takes at most this many tokens, padding included.

    Raises:
        ConfigError: The model or tokenizer does not exist, or the model does not have exactly one output, or lacks
            weights.
    """

    def __init__(self, path: str, system_prompt: str = "", max_tokens: int = 4096) -> None:
        self.path = path
        self._device = choose_device(self.ctx.devices)
        self.model = load_scorer(path, self._device)
        self._encoder = load_scorer_encoder(path, system_prompt)
        self._settings: Any = self.model.config.get_text_config()
        self._max_tokens = max_tokens
        self._padding: int | None = self._settings.pad_token_id
        self._equal = self._depends_on_padding()

    @endpoint(collect=first())
    def note(self) -> str:
        """As :meth:`.Learner.note`."""
        if not self._equal:
            return ""
        return f"{type(self.model).__name__} gets rows of one length at a time, because its scores depend on padding"

    @endpoint(dispatch=shard(args=("batch",)), collect=concat(), readonly=True)
    def score(self, batch: Batch) -> Batch:
        """Score each completion.

        Args:
            batch: The Python columns ``messages``, the prompt as chat messages; ``prompt``, its text as the policy saw
                it; ``completion``, text; and ``tools``, lists of schemas or None, which may be missing.

        Returns:
            ``rewards``, float32 ``[B]``.

        Raises:
            DataError: A text is longer than the model's positions.
        """
        columns = [batch.python(name) for name in ("messages", "prompt", "completion")]
        columns.append(batch.python("tools") if "tools" in batch else [None] * len(columns[0]))
        ids = [self._encode(*row) for row in zip(*columns, strict=True)]
        most = getattr(self._settings, "max_position_embeddings", None)
        if most is not None and any(len(row) > most for row in ids):
            raise DataError(
                f"a prompt with its completion has {max(map(len, ids))} tokens for the reward model {self.path}, which "
                f"has {most} positions: lower sampling.max_new_tokens or data.max_prompt_tokens"
            )
        scores_B = torch.zeros(len(ids))
        self._settings.pad_token_id = self._padding_of(ids)
        equal, turn = self._equal or self._settings.pad_token_id == _NO_TOKEN, longrope_threshold(self._settings)
        for rows in plan([len(row) for row in ids], self._max_tokens, packed=False, equal=equal, turn=turn):
            scores_B[rows] = self._score_together([ids[row] for row in rows])
        return Batch({fields.REWARDS: scores_B})

    def _score_together(self, rows: Sequence[Sequence[int]]) -> Tensor:
        texts = [torch.tensor(row) for row in rows]
        padding = max(0, self._settings.pad_token_id)
        padded = pad_sequence(texts, batch_first=True, padding_value=padding).to(self._device)
        mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True).to(self._device)
        with torch.no_grad():
            logits = self.model(input_ids=padded, attention_mask=mask).logits
        return logits[:, 0].float().cpu()

    def _depends_on_padding(self) -> bool:
        """Whether the model scores a short text in another way beside a long one, tried on two texts."""
        model: Any = self.model
        usual = range(3, min(model.get_input_embeddings().weight.shape[0], 100))
        texts = [[token for token in usual if token != self._padding][:length] for length in (12, 5)]
        if not texts[1]:
            return False
        self._settings.pad_token_id = self._padding_of(texts)
        alone = torch.cat([self._score_together([text]) for text in texts])
        allowed = torch.finfo(model.dtype).eps ** 0.5
        return not torch.allclose(self._score_together(texts), alone, rtol=allowed, atol=allowed)

    def _padding_of(self, ids: Sequence[Sequence[int]]) -> int:
        """Return the model's own padding token, or a token that no text has; _NO_TOKEN if the texts have all tokens.

        The model scores at the last token of a row that is no padding. The tokenizer's padding token may be one that
        ends texts, and the model would then score at the token before.
        """
        if self._padding is not None:
            return self._padding
        used = set(itertools.chain.from_iterable(ids))
        return next((token for token in range(self._settings.vocab_size) if token not in used), _NO_TOKEN)

    def _encode(self, messages: Sequence[Any], prompt: str, completion: str, tools: list[Any] | None) -> list[int]:
        answer = [{"role": "assistant", "content": completion}]
        return self._encoder.encode_answer(messages, answer, prompt + completion, tools)
