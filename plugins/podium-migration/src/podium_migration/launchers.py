"""The options with which a shell script starts its processes: those of torchrun, accelerate launch and deepspeed."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import yaml

from podium_migration.script_changes import ScriptChange
from podium_migration.shell import UNDECIDED

OF_TRL: Final = (
    *("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "multi_gpu"),
    *("num_cpu_threads_per_process", "config_file", "accelerate_config"),
)
"""The options of accelerate launch that the command ``trl`` takes among its own."""
_PROGRAMS: Final = {
    **dict.fromkeys(("torchrun", "torch.distributed.run", "torch.distributed.launch"), "torchrun"),
    **dict.fromkeys(("accelerate", "accelerate.commands.launch"), "accelerate launch"),
    "deepspeed": "deepspeed",
}
_OTHER_PROGRAMS: Final = ("srun", "mpirun", "mpiexec", "orterun", "horovodrun")
_COUNTS: Final = {  # what a program calls the number of processes, and the number of machines by which it multiplies
    "torchrun": ("nproc_per_node", "nnodes"),
    "accelerate launch": ("num_processes", ""),  # the processes of all machines together
    "deepspeed": ("num_gpus", "num_nodes"),
}
_FILES: Final = ("config_file", "accelerate_config")
_HARMLESS: Final = frozenset(
    {
        *("num_machines", "machine_rank", "main_process_ip", "main_process_port", "same_network", "rdzv_backend"),
        *(
            "rdzv_endpoint",
            "rdzv_id",
            "rdzv_conf",
            "standalone",
            "node_rank",
            "local_rank",
            "master_addr",
            "master_port",
        ),
        *("local_addr", "max_restarts", "monitor_interval", "start_method", "role", "module", "no_python", "run_path"),
        *(
            "log_dir",
            "logs_specs",
            "redirects",
            "tee",
            "local_ranks_filter",
            "duplicate_stdout_filters",
            "quiet",
            "debug",
        ),
        *("duplicate_stderr_filters", "signals_to_handle", "shutdown_timeout", "event_log_handler", "numa_binding"),
        *(
            "virtual_local_rank",
            "use_env",
            "multi_gpu",
            "gpu_ids",
            "num_cpu_threads_per_process",
            "enable_cpu_affinity",
        ),
        *("main_training_function", "env", "force_multi", "launcher", "no_ssh", "save_pid", "enable_each_rank_log"),
        *("main_args", "bind_cores_to_rank", "bind_core_list", "no_local_rank", "hostfile", "deepspeed_hostfile"),
        *("deepspeed_multinode_launcher", "mpirun_hostfile", "mpirun_ccl"),
    }
)
"""Options that say where processes run and how they meet, not how many there are or what they learn."""
_SHARDING: Final = "parallel.strategy fsdp2 shards parameters, gradients and optimizer"
_REMARKS: Final = {
    "mixed_precision": "parallel.precision is the type of matrix products, and bfloat16 on accelerators by default",
    "downcast_bf16": "parallel.precision is the type of matrix products, and bfloat16 on accelerators by default",
    "gradient_accumulation_steps": "batch.prompts or batch.examples is the batch of a step on all ranks together",
    "gradient_clipping": "optim.grad_clip is the largest norm of the gradients",
    "cpu": "accelerators are used where there are some",
}
_NOT_READ: Final = "this option of {program} is not read: give what it changes as NAME=VALUE behind the file"


class Launch(NamedTuple):
    """How a script starts its processes.

    Attributes:
        processes: Their number on all machines together; 0 where the script does not say it.
        remarks: What the options do beside this.
    """

    processes: int
    remarks: list[ScriptChange]


def read_launch(words: Sequence[str], folder: Path) -> Launch:
    """Read the words before the script in a command of a shell script that lies in ``folder``."""
    places = [(index, _PROGRAMS[name]) for index, name in enumerate(map(os.path.basename, words)) if name in _PROGRAMS]
    end, program = places[0] if places else (len(words), "")
    remarks = [*_list_other_options(words[:end])]
    if not program:
        return Launch(0, remarks)
    launch = read_launch_options(dict(_list_options(words[end:])), program, folder)
    return Launch(launch.processes, [*remarks, *launch.remarks])


def read_launch_options(
    options: Mapping[str, str], program: str = "accelerate launch", folder: Path | None = None
) -> Launch:
    """Return what options of a launcher mean. Their names have underscores and no dashes."""
    count_name, machines_name = _COUNTS[program]
    options, remarks = dict(options), list[ScriptChange]()
    file = next((options.pop(name) for name in _FILES if name in options), "")
    if file:
        content = _read_file(file, folder)
        processes = content.get("num_processes")
        options = ({"num_processes": str(processes)} if isinstance(processes, int) else {}) | options
        remarks.append(_describe("config_file", file, _OF_FILE if content else _MISSING))
    numbers = [options.pop(name, None) for name in (count_name, machines_name)]
    for name, value in zip((count_name, machines_name), numbers, strict=True):
        if value is not None and not value.isdigit():
            remarks.append(_describe(name, value, _NO_NUMBER))
    for name, value in options.items():
        if name not in _HARMLESS:
            shards = name.startswith(("fsdp_", "zero", "deepspeed_", "offload_")) or name in (
                "use_fsdp",
                "use_deepspeed",
            )
            remark = _SHARDING if shards else _REMARKS.get(name, _NOT_READ.format(program=program))
            remarks.append(_describe(name, value, remark))
    if all(value is None for value in numbers) or any(value and not value.isdigit() for value in numbers):
        return Launch(0, remarks)
    if numbers[0] is None and program == "deepspeed":  # all devices of each machine
        return Launch(0, remarks)
    return Launch(int(numbers[0] or 1) * int(numbers[1] or 1), remarks)


_OF_FILE: Final = "of this file the number of processes is read, and no other setting"
_MISSING: Final = "this file of accelerate is neither here nor beside the script, or is no mapping, and was not read"
_NO_NUMBER: Final = "the number of processes is not known: set placement.ranks, and the batch to that of all processes"


def _describe(name: str, value: str, remark: str) -> ScriptChange:
    return ScriptChange(f"--{name}" + (f"={value.replace(UNDECIDED, '…')}" if value else ""), remark)


def _list_options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The options of a launcher; one without a value has the value ""."""
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            following = words[index + 1] if index + 1 < len(words) and not equals else "-"
            yield name.replace("-", "_"), value if following.startswith("-") else following


def _list_other_options(words: Sequence[str]) -> Iterator[ScriptChange]:
    """Name the options of a program that starts processes too, and whose options are not read."""
    programs = [index for index, word in enumerate(words) if os.path.basename(word) in _OTHER_PROGRAMS]
    for index in programs[:1]:
        program = os.path.basename(words[index])
        if options := [word for word in words[index:] if word.startswith("-")]:
            remark = f"options of {program} are not read: check placement.ranks, the number of all processes"
            yield ScriptChange(f"{program} {' '.join(options).replace(UNDECIDED, '…')}", remark)


def _read_file(file: str, folder: Path | None) -> dict[str, Any]:
    for candidate in (Path(file), *([folder / file] if folder else [])):
        if UNDECIDED not in file and candidate.is_file():
            try:
                content: Any = yaml.safe_load(candidate.read_text(encoding="utf-8"))
            except (OSError, ValueError, yaml.YAMLError):
                return {}
            return cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    return {}
