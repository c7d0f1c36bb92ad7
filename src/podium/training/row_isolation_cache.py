"""Results of :mod:`.row_isolation` for large models, kept in the user's cache, because a test costs several passes.

A file stands for all that a verdict depends on: its name is a digest of the model's code, configuration and modules, a
sample of its weights, the versions of torch, transformers and peft, Podium's own code, the device, and the trial. So
there is nothing to keep up to date: what differs has another name. A model whose code does not come from these
packages, or was patched from elsewhere, is tried at every start. So is one of few parameters, for which a trial takes
no longer than the digest.

The folder is ``podium/row-isolation`` below ``XDG_CACHE_HOME`` (``~/.cache``). Nothing is read from a folder or file
that another user owns or may write to, nor through a link below that place; nothing but the verdict's number is read.
"""

import hashlib
import json
import logging
import os
import secrets
import stat
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

_logger = logging.getLogger(__name__)

_FROM: Final = 20_000_000  # parameters
_SAMPLE: Final = 256  # elements of each tensor
_LARGEST: Final = 256  # bytes of a file
_PACKAGES: Final = ("torch", "transformers", "peft", "podium")
_PASSIVE: Final = ("numpy", "huggingface_hub", "typing_extensions", "packaging", "safetensors", "accelerate", "einops")
"""Packages of which the modules of a model import functions."""
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class RowIsolationCache:
    """The kept verdicts on one model.

    Args:
        sentences: All verdicts that may be kept; others are made anew at every start.
        sharded: Whether the ranks of the default process group hold shards of one model, so that all must make a
            trial, or none.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, precision: torch.dtype, sentences: Sequence[str], *, sharded: bool
    ) -> None:
        self._sentences, self._sharded = sentences, sharded
        self._identity: str | None = None
        if sum(parameter.numel() for parameter in model.parameters()) >= _FROM:
            self._identity = _identify(model, device, precision)
        if not self._agree(self._identity is not None):
            self._identity = None

    def find(self, trial: str) -> str | None:
        """Return the verdict of a trial with this name; None where the trial must be made."""
        if self._identity is None:
            return None
        path, verdict = self._path(trial), None
        with suppress(OSError, ValueError, TypeError, LookupError):
            number = json.loads(_read_file(path))["verdict"]
            verdict = self._sentences[number] if type(number) is int and number >= 0 else None
        if not self._agree(verdict is not None):
            return None
        _logger.info("the check whether rows affect each other is skipped: %s has its result", path)
        return verdict

    def keep(self, trial: str, verdict: str) -> None:
        """Keep a verdict for later starts, where there is a place for it."""
        if self._identity is None or verdict not in self._sentences:
            return
        path = self._path(trial)
        try:
            _write_file(path, json.dumps({"verdict": self._sentences.index(verdict)}).encode())
        except OSError as error:
            _logger.info(
                "the result of the check whether rows affect each other cannot be saved to %s: %s", path, error
            )

    def _path(self, trial: str) -> Path:
        digest = hashlib.blake2b(f"{self._identity} {trial}".encode(), digest_size=20)
        return _folder() / f"{digest.hexdigest()}.json"

    def _agree(self, is_true: bool) -> bool:
        """Whether something is true on this rank, and on all others if the trial needs them."""
        if not self._sharded or dist.get_world_size() == 1:
            return is_true
        every = [is_true] * dist.get_world_size()
        dist.all_gather_object(every, is_true)
        return all(every)


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "podium" / "row-isolation"


def _check_owner(status: os.stat_result) -> None:
    """Raise OSError if somebody else owns a file or folder, or may write to it."""
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError("another user owns it or may write to it")


def _open_folder(path: Path) -> int:
    """Open a folder two levels below the user's cache, each level without following links."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    upper = os.open(path.parent, flags)
    try:
        _check_owner(os.fstat(upper))
        folder = os.open(path.name, flags, dir_fd=upper)
    finally:
        os.close(upper)
    try:
        _check_owner(os.fstat(folder))
    except OSError:
        os.close(folder)
        raise
    return folder


def _read_file(path: Path) -> bytes:
    folder = _open_folder(path.parent)
    try:
        descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _check_owner(status)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("no regular file")
        return file.read(_LARGEST)


def _write_file(path: Path, content: bytes) -> None:
    path.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.parent.mkdir(exist_ok=True, mode=0o700)
    folder = _open_folder(path.parent)
    aside = f"{path.stem}.{secrets.token_hex(8)}.tmp"
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(aside, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(aside, dir_fd=folder)
        os.close(folder)


def _identify(model: nn.Module, device: torch.device, precision: torch.dtype) -> str | None:
    """Return a digest of all that a verdict depends on; None where some of the code is not known by its files."""
    config: Any = getattr(model, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    code = _digest_code(tuple(sorted(_code_folders(model)))) if _is_known(model, attention) else None
    if code is None or config is None:
        return None
    digest = hashlib.blake2b(digest_size=20)
    kind = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        kind = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    for fact in (
        *(code, config.to_json_string(use_diff=False), attention, device.type, kind, precision),
        torch.get_float32_matmul_precision(),
        *((name, type(module), module.__dict__.get("forward") is None) for name, module in model.named_modules()),
        *(hook.__qualname__ for module in model.modules() for hook in _hooks(module)),
    ):
        digest.update(repr(fact).encode("utf-8", "surrogatepass") + b"\n")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(repr((name, tensor.shape, tensor.dtype)).encode())
        digest.update(_sample(tensor))
    return digest.hexdigest()


def _sample(tensor: Tensor) -> bytes:
    """Return some elements of a tensor, of the shard that this rank has of it."""
    local: Any = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    step = max(1, local.numel() // _SAMPLE)
    return local.reshape(-1)[::step].contiguous().view(torch.uint8).cpu().numpy().tobytes()


def _hooks(module: nn.Module) -> Iterator[Any]:
    for name in _HOOKS:
        for hook in getattr(module, name).values():
            yield getattr(hook, "__func__", hook)


def _is_known(model: nn.Module, attention: str | None) -> bool:
    """Whether all code that the model runs comes from files of the packages that the digest covers."""
    registry: Any = transformers.AttentionInterface()
    functions = [registry[attention]] if attention in registry else []
    for module in model.modules():
        functions += _hooks(module)
        functions += [getattr(value, "__func__", value) for key, value in module.__dict__.items() if key == "forward"]
    if not all(_is_from_packages(function, _PACKAGES) for function in functions):
        return False
    return all(_is_known_class(kind) for kind in {kind for module in model.modules() for kind in type(module).mro()})


def _is_known_class(kind: type) -> bool:
    root = kind.__module__.partition(".")[0]
    if root in ("builtins", "abc", "typing"):
        return True
    if root not in _PACKAGES or kind.__module__ not in sys.modules:
        return False
    functions = [*vars(kind).values()]
    if root != "torch":
        functions += vars(sys.modules[kind.__module__]).values()
    return all(
        _is_from_packages(function, (*_PACKAGES, *_PASSIVE))
        for function in functions
        if isinstance(function, FunctionType)
    )


def _is_from_packages(function: Any, packages: Sequence[str]) -> bool:
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function).__module__.partition(".")[0] in packages
    if code.co_filename == "<string>":  # what dataclass writes
        return code.co_name.startswith("__")
    return code.co_filename.startswith("<frozen ") or _is_in(code.co_filename, tuple(packages))


@cache
def _is_in(name: str, packages: tuple[str, ...]) -> bool:
    """Whether a file is of these packages, or of Python itself."""
    path = os.path.realpath(name)
    if path.startswith(_STANDARD) and "-packages" not in path:
        return True
    return any(path.startswith(folder) for package in packages for folder in _folders(package))


_STANDARD: Final = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep


@cache
def _folders(package: str) -> tuple[str, ...]:
    module = sys.modules.get(package)
    return tuple(os.path.realpath(folder) + os.sep for folder in getattr(module, "__path__", ()))


def _code_folders(model: nn.Module) -> Iterator[Path]:
    """Yield the folders of the code that the model runs, except torch's."""
    for module_name in {type(module).__module__ for module in model.modules()}:
        file = getattr(sys.modules.get(module_name), "__file__", None)
        if file is not None and not module_name.startswith("torch."):
            yield Path(file).parent
    library, training = Path(transformers.__file__).parent, Path(__file__).parent
    yield from (library, library / "integrations", training, training.parent / "models")


@cache
def _digest_code(folders: tuple[Path, ...]) -> str:
    digest = hashlib.blake2b(repr(_versions()).encode(), digest_size=20)
    for folder in dict.fromkeys(folders):
        for file in sorted(folder.glob("*.py")):
            digest.update(f"{file.name}\n".encode() + hashlib.blake2b(file.read_bytes()).digest())
    return digest.hexdigest()


def _versions() -> list[Any]:
    return [getattr(sys.modules.get(name), "__version__", None) for name in _PACKAGES] + [torch.version.git_version]
