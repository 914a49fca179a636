"""Train a GPT as described by a run config.

usage: python -m trainer -c run.yaml [-o KEY=VALUE]... [KEY=VALUE]...
       torchrun --nproc-per-node 2 -m trainer -c run.yaml
       python -m trainer --model_name_or_path gpt2-en --input_dir ./data --max_steps 20 ...

  -c, --config FILE    run config: YAML, or JSON from `gptctl validate --resolved --json`
  -o, --override K=V   override one key; K=V alone does the same (trainer_config.max_epochs=2)
  --NAME VALUE         flags of PaddleNLP's GPT: --mp_degree 2 --use_amp true --max_lr 0.00015 ...
  -h, --help           show this text
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainer.config import load
from trainer.config.flags import parse_arguments
from trainer.program import print_error, run_program, tell
from trainer.rank_log import UNRECOVERABLE
from trainer.stop import StopRequest


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print((__doc__ or "").strip())
        return 0
    if not arguments:
        print((__doc__ or "").strip(), file=sys.stderr)
        return UNRECOVERABLE
    return run_program(_train, arguments)


def _train(arguments: Sequence[str], stop: StopRequest) -> None:
    from trainer.mesh import join, machines
    from trainer.metrics import Log
    from trainer.out_of_memory import explained
    from trainer.train import train
    from trainer.watchdog import watched

    path, overrides = parse_arguments(arguments)
    resolved = load(path, overrides, machines())
    # Findings are logged only now, because the log needs the rank and its style.
    with (
        join(resolved.run, resolved.layout) as mesh,
        watched(resolved.run, mesh, print_error),
        explained(resolved.run, mesh),
    ):
        log = Log(resolved.run.Engine.log_style, mesh.rank)
        if mesh.is_first:
            tell(resolved.findings, log)
        train(resolved.run, mesh, log, stop)


if __name__ == "__main__":
    sys.exit(main())
