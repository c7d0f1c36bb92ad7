"""`python -m bench.resumes`: runs with random settings, once whole, once ended at random and resumed: the same bits.

    python -m bench.resumes --cases 50          fifty cases from seed 0
    python -m bench.resumes --seed 17 --cases 1 --folder FOLDER    one of them again, and keep its files

A line a case is printed, and what differs in it. The exit status is 1 if anything does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.resumes", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="that of the first case; the others follow it")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    options = parser.parse_args()
    os.environ |= dict.fromkeys(THREADS, "1")  # before torch is imported

    from bench.resumes.attempts import import_ahead
    from bench.resumes.trial import try_case

    import_ahead()
    wrong = 0
    for seed in range(options.seed, options.seed + options.cases):
        with tempfile.TemporaryDirectory(prefix="podium-resumes-") as temporary:
            folder = Path(temporary) if options.folder is None else options.folder / str(seed)
            folder.mkdir(parents=True, exist_ok=True)
            result = try_case(seed, folder)
        wrong += bool(result["differences"])
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
