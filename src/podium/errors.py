"""All errors that Podium raises on purpose.

PodiumError
├── ConfigError          a setting, an argument or a declaration is wrong (also a ValueError)
├── DataError            a file, a row or a column is missing or malformed
├── PlacementError       the requested resources are not available
├── WorkerStartError     a worker process or a worker's constructor failed
├── WorkerDied           a worker process ended while it was needed
├── EndpointError        a worker's endpoint raised; the original is ``__cause__`` when it pickles
├── DeadlineExceeded     a call did not finish in time (also a TimeoutError)
├── CallCancelled        the result of a cancelled call was asked for
├── SerializationError   a value cannot be sent to or from a worker
├── StoreFullError       tensors that are kept by reference do not fit
├── RefLostError         the tensors behind a reference are gone with their owner
├── GenerationError      no token can be drawn from the model
├── ContextFull          a conversation leaves no room for an answer in the model's context
├── NoRowsError          the sessions of an environment have given nothing to train or to judge
├── RewardError          a reward function raised, or returned a value that is no score
├── CheckpointError      a checkpoint is missing, unfinished or does not fit
└── LostTooOften         a run has lost workers more often than it goes on after

RunInterrupted is no PodiumError: as KeyboardInterrupt, it passes ``except Exception``.

All of them pickle, so that a worker of a worker can raise them through two processes.
"""

from collections.abc import Sequence
from typing import Any

from podium.secrecy import mask_text

__all__ = [
    "CallCancelled",
    "CheckpointError",
    "ConfigError",
    "ContextFull",
    "DataError",
    "DeadlineExceeded",
    "EndpointError",
    "GenerationError",
    "LostTooOften",
    "NoRowsError",
    "PlacementError",
    "PodiumError",
    "RefLostError",
    "RewardError",
    "RunInterrupted",
    "SerializationError",
    "StoreFullError",
    "WorkerDied",
    "WorkerStartError",
]


class PodiumError(Exception):
    """The base class: ``except PodiumError`` catches what Podium raises on purpose and nothing else.

    ``lost`` names the process whose end caused the error, and says how it ended: "rank 0 of policy (signal SIGKILL)".
    It is empty if no process has ended.
    """

    lost: str = ""

    def __str__(self) -> str:
        return mask_text(super().__str__())

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args), self.__dict__


def _rebuild(cls: type[PodiumError], args: tuple[Any, ...]) -> PodiumError:
    error = cls.__new__(cls)  # not by __init__, which may take other arguments
    error.args = args
    return error


class ConfigError(PodiumError, ValueError):
    """A setting, an argument or a declaration is wrong; nothing was started."""


class DataError(PodiumError):
    """A file, a row or a column is missing or malformed."""


class PlacementError(PodiumError):
    """The requested resources are not available. The message says what is free and who holds the rest."""


class WorkerStartError(PodiumError):
    """A worker process did not start, or a worker's constructor raised; ``__cause__`` is then that exception.

    ``rank`` is the first rank that failed, and ``remote_traceback`` the text of its traceback if there is one.
    """

    def __init__(self, message: str, *, rank: int | None = None, remote_traceback: str = "", lost: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback
        self.lost = lost


class WorkerDied(PodiumError):
    """A worker process ended while it was needed.

    ``cause`` reads "signal SIGKILL" or "exit code 3"; ``last_words`` are the last lines it wrote to stderr.
    """

    def __init__(
        self, message: str, *, rank: int, node: str, cause: str, role: str = "", last_words: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.node = node
        self.cause = cause
        self.role = role
        self.last_words = tuple(last_words)
        self.lost = f"rank {rank} of {role} ({cause})"


class EndpointError(PodiumError):
    """An endpoint raised on ``rank``. ``__cause__`` is the original exception when it pickles.

    ``remote_traceback`` is the worker's own traceback as text, which also stands in the message.
    """

    def __init__(self, message: str, *, method: str, rank: int, role: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.method = method
        self.rank = rank
        self.role = role
        self.remote_traceback = remote_traceback


class DeadlineExceeded(PodiumError, TimeoutError):
    """A call passed its deadline. ``running`` lists the ranks that had not answered."""

    def __init__(self, message: str, *, method: str = "", running: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.method = method
        self.running = tuple(running)


class CallCancelled(PodiumError):
    """The call was cancelled before it had a result."""


class SerializationError(PodiumError):
    """A value cannot be sent to or from a worker. The message names the value and the place."""


class StoreFullError(PodiumError):
    """Tensors that are kept by reference do not fit into their store. The message says who holds most of it."""


class RefLostError(PodiumError):
    """The tensors behind a reference are gone, because the process that owned them has ended. The message names it."""


class GenerationError(PodiumError):
    """No token can be drawn: the model's logits are not finite, or not all of its weights have arrived."""


class ContextFull(PodiumError):
    """A conversation leaves no room for an answer in the model's context, or its session has used up a limit of
    ``environment.options``."""


class NoRowsError(PodiumError):
    """The sessions of an environment gave nothing to train on or to evaluate: all failed, or none called the model."""


class RewardError(PodiumError):
    """A reward function raised, ran out of time, or returned something other than a finite score."""


class CheckpointError(PodiumError):
    """A checkpoint is missing, unfinished or does not fit the model or the configuration."""


class LostTooOften(PodiumError):
    """A run has lost workers more often than ``run.max_restarts`` allows. The message lists the losses, the first one
    first.
    """


class RunInterrupted(SystemExit, KeyboardInterrupt):
    """A signal ended a training run before its step was finished and saved.

    Where nobody catches it, the script ends with the status ``code``, which is 128 plus the signal's number, and prints
    no traceback, since it is a ``SystemExit``. It is raised to the script once the run is left: within the run the
    signal raises ``KeyboardInterrupt``, which no handler of ``SystemExit`` takes for a failure of somebody's code.
    """
