"""The stages of a run, in their order: what each shows, its budget, and what its figures are predicted to be.

The predictions were written before any GPU had run a stage; a prediction is not changed to fit a figure. Each follows
from two ceilings of an H100 as this project's machines have it, seen before with other programs: 3.0 TB/s read and
written by a copy, and about 800 TFLOP/s of a bf16 product. The budgets add up to less than the whole run's limit.
"""

from __future__ import annotations

from bench.gpu.runner import Planned, Prediction

STAGES = (
    Planned(
        name="preflight",
        what="versions; descriptors, tensors between processes, CUDA IPC and NCCL, each tried once",
        budget_s=25,
        function="bench.gpu.machine:preflight",
        predictions=(
            Prediction(figure="device_memory", low=78, high=142, unit="GiB", why="an H100 has 80 GB, an H200 141"),
        ),
    ),
    Planned(
        name="rates",
        what="the rates of copies and of matrix products, which limit all figures below",
        budget_s=15,
        function="bench.gpu.machine:rates",
        predictions=(
            Prediction(figure="copy", low=2.7, high=4.5, unit="TB/s", why="seen: 3.0 (H100), 4.3 (H200)"),
            Prediction(figure="product_bf16", low=700, high=850, unit="TFLOP/s", why="seen: 769 to 798"),
            Prediction(figure="product_float32", low=40, high=60, unit="TFLOP/s", why="67 by the datasheet, no tf32"),
            Prediction(figure="bus_to_device", low=20, high=60, unit="GB/s", why="PCIe 5.0 x16 carries 63"),
            Prediction(figure="launch", low=2.5, high=8, unit="µs", why="an operation of torch costs the CPU so much"),
        ),
    ),
    Planned(
        name="families",
        what="the native engine's log-probabilities compared with transformers': six families, two types",
        budget_s=30,
        function="bench.gpu.numerics:families",
    ),
    Planned(
        name="packed",
        what="log-probabilities and gradients of packed and padded rows, compared with float64 on the CPU",
        budget_s=25,
        function="bench.gpu.numerics:packed",
    ),
    Planned(
        name="head",
        what="the output layer over 151,936 tokens compared with float64, and the memory that each token of a row adds",
        budget_s=35,
        function="bench.gpu.numerics:head",
        predictions=(
            Prediction(
                figure="growth",
                low=0.05,
                high=0.35,
                unit="rows of logits",
                why="about 20,000 numbers of one small layer a token, where a row of logits has 151,936",
            ),
        ),
    ),
    Planned(
        name="marked",
        what="the tests that are marked gpu: algorithms, devices and the native engine, compared with the CPU",
        budget_s=40,
        function="bench.gpu.paths:marked",
    ),
    Planned(
        name="paths",
        what="short trainings on the ways through all trainers, each in processes of its own",
        budget_s=75,
        function="bench.gpu.paths:paths",
        predictions=(
            Prediction(figure="trainings", low=0.2, high=1.0, unit="trainings/s", why="imports, six at a time"),
        ),
    ),
    Planned(
        name="learns",
        what="the quickstart's short form learns on the GPU",
        budget_s=60,
        function="bench.gpu.paths:learns",
        predictions=(
            Prediction(figure="accuracy_after", low=0.95, high=1.0, unit="", why="it stops at 0.97, as on CPUs"),
            Prediction(
                figure="seconds", low=15, high=50, unit="s", why="180 steps of some 300 small operations a token"
            ),
        ),
    ),
    Planned(
        name="checkpoint",
        what="a new process that reads a checkpoint continues like the process that wrote it",
        budget_s=25,
        function="bench.gpu.groups:checkpoint",
    ),
    Planned(
        name="fsdp2",
        what="FSDP2 over one rank, through NCCL, compared with a replicated model",
        budget_s=25,
        function="bench.gpu.groups:fsdp2",
    ),
    Planned(
        name="two_ranks",
        what="two ranks that share the GPU, compared with one rank that uses it alone",
        budget_s=35,
        function="bench.gpu.groups:two_ranks",
    ),
    Planned(
        name="sleep",
        what="parallel.offload: weights and optimizer state at Qwen2.5-0.5B's shape leave the GPU and return",
        budget_s=60,
        function="bench.gpu.limits:sleep",
        predictions=(
            Prediction(
                figure="freed",
                low=6.5,
                high=8.5,
                unit="GiB",
                why="0.49G parameters of 16 bytes: weight, gradient and two moments in float32",
            ),
            Prediction(
                figure="there_and_back",
                low=0.2,
                high=6,
                unit="s",
                why="7.9 GB each way, at 60 GB/s from pinned memory and at about 3 from memory that is not",
            ),
        ),
    ),
    Planned(
        name="sigkill",
        what="SIGKILL during a kernel: the time until the script knows, and until the GPU's memory is free",
        budget_s=20,
        function="bench.gpu.processes:sigkill",
        predictions=(
            Prediction(figure="noticed", low=1, high=500, unit="ms", why="the driver tears the process's memory down"),
            Prediction(figure="freed", low=20, high=2000, unit="ms", why="16 GiB are unmapped by the driver"),
        ),
    ),
    Planned(
        name="hop",
        what="a tensor of 512 MiB from one worker to another on the same GPU",
        budget_s=15,
        function="bench.gpu.processes:hop",
        predictions=(
            Prediction(figure="hop_rate", low=1.5, high=12, unit="GB/s", why="it goes through pageable host memory"),
        ),
    ),
    Planned(
        name="ipc",
        what="Qwen2.5-0.5B's weights to a generator's process on the same GPU, by CUDA IPC and through the host",
        budget_s=60,
        function="bench.gpu.publish:ipc",
        predictions=(
            Prediction(
                figure="ipc",
                low=20,
                high=300,
                unit="ms",
                why="290 tensors opened at 20 to 200 µs each, and the checksums of 2 GB twice; the copy takes 1 ms",
            ),
            Prediction(figure="host", low=600, high=6000, unit="ms", why="2 GB at 1 to 6 GB/s, twice, and checksums"),
        ),
    ),
    Planned(
        name="grpo",
        what="a colocated GRPO step at Qwen2.5-0.5B's shape: 256 completions of 256 tokens",
        budget_s=60,
        function="bench.gpu.training:colocated",
        predictions=(
            Prediction(
                figure="step", low=3.5, high=12, unit="s", why="the sum of the two below, and log-probabilities"
            ),
            Prediction(
                figure="generated",
                low=8_000,
                high=25_000,
                unit="tokens/s",
                why="256 rows a token; 24 layers of about 15 operations of 5 to 8 µs, and sampling",
            ),
            Prediction(
                figure="update",
                low=900,
                high=3000,
                unit="ms",
                why="82k tokens x 6 x 0.49G = 2.4e14 operations, at a sixth to a third of the measured product rate",
            ),
            Prediction(
                figure="memory_peak", low=12, high=45, unit="GiB", why="8 of state; activations of 4,096 tokens"
            ),
        ),
    ),
    Planned(
        name="split",
        what="the same with the generator in a process of its own on the same GPU",
        budget_s=80,
        function="bench.gpu.training:split",
        predictions=(
            Prediction(
                figure="publication",
                low=1,
                high=2000,
                unit="ms",
                why="2 GB in float32: 1 ms where the memory is mapped, about 1 s where it goes through the host",
            ),
        ),
    ),
    Planned(
        name="trl",
        what="a step at 95M parameters beside TRL's, at equal lengths",
        budget_s=80,
        function="bench.gpu.training:beside_trl",
        predictions=(
            Prediction(
                figure="times_trl",
                low=1.0,
                high=3.0,
                unit="times",
                why="both are bound by the start of operations in generation, where Podium starts fewer",
            ),
        ),
    ),
    Planned(
        name="trl_135m",
        what="the same at SmolLM2-135M's sizes: 30 layers of 576, 49,152 words",
        budget_s=110,
        function="bench.gpu.training:beside_trl_135m",
        predictions=(
            Prediction(
                figure="times_trl", low=1.0, high=3.0, unit="times", why="more layers, so that starts count more"
            ),
        ),
    ),
    Planned(
        name="real",
        what="SmolLM2-135M-Instruct learns sums by GRPO, with all weights and with adapters (12 steps each)",
        budget_s=110,
        least_s=45,
        function="bench.gpu.paths:real",
        predictions=(
            Prediction(figure="full_after", low=0.5, high=0.9, unit="", why="0.75 on a CPU after 12 steps"),
            Prediction(
                figure="full_seconds", low=15, high=60, unit="s", why="imports, and 12 steps of some 14 tokens of 15 ms"
            ),
        ),
    ),
    Planned(
        name="decode",
        what="the native engine at Qwen2.5-0.5B's shape, 1 to 512 rows, with CUDA graphs and without",
        budget_s=45,
        function="bench.gpu.limits:decode",
        predictions=(
            Prediction(
                figure="plain_1", low=60, high=250, unit="tokens/s", why="about 360 operations a token, 10 µs each"
            ),
            Prediction(figure="plain_512", low=20_000, high=60_000, unit="tokens/s", why="the same time for 512 rows"),
        ),
    ),
    Planned(
        name="graphs",
        what="CUDA graphs of decode steps compared with the loop: tokens, log-probabilities, and time for each token",
        budget_s=55,
        function="bench.gpu.limits:graphs",
        predictions=(
            Prediction(figure="graphs_1", low=0.6, high=2.5, unit="ms", why="1 GB read, and 400 kernels of 2 to 4 µs"),
            Prediction(
                figure="times_1", low=2, high=8, unit="times", why="the loop starts 400 operations at 5 to 10 µs"
            ),
            Prediction(
                figure="times_256", low=1.2, high=4, unit="times", why="the draw over 152k words costs the same"
            ),
        ),
    ),
    Planned(
        name="longest",
        what="the longest row for which a step at Qwen2.5-0.5B's shape has enough memory",
        budget_s=40,
        function="bench.gpu.limits:longest_row",
        predictions=(
            Prediction(
                figure="longest",
                low=65_536,
                high=524_288,
                unit="tokens",
                why="with an output layer in chunks: 24 layers keep 1.8 kB a token each, and one is computed again",
            ),
        ),
    ),
    Planned(
        name="decode_kernels",
        what="where the time of a decode step of 256 rows goes at Qwen2.5-0.5B's shape, kernel by kernel",
        budget_s=60,
        function="bench.gpu.profiles:decode_kernels",
        predictions=(
            Prediction(
                figure="loop_busy",
                low=60,
                high=250,
                unit="ms",
                why="32 tokens of 1 GB of weights and 0.3 GB of logits several times, in 1,000 kernels of 2 to 5 µs",
            ),
        ),
    ),
    Planned(
        name="update_kernels",
        what="the same of an optimizer step over 64 rows of 320 tokens, at Qwen2.5-0.5B's and SmolLM2-135M's shapes",
        budget_s=75,
        function="bench.gpu.profiles:update_kernels",
        predictions=(
            Prediction(
                figure="05b_busy",
                low=200,
                high=700,
                unit="ms",
                why="6e13 operations in bf16 and 1.7e13 in float32 for the output layer, if that is not in bf16",
            ),
        ),
    ),
)
