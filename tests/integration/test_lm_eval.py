"""lm-evaluation-harness on an exported model, offline. Oracle: both programs must agree, and words by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trained import json_of, task, trained

pytestmark = pytest.mark.long
# The model can count: it knows the last word of the first four. Its context has 16 characters.
RIGHT = ["one two three", "two three four", "six seven eight", "nine ten one"]
WRONG = ["one two nine", "six seven two"]
TASK = """\
task: counting
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{context}}"
doc_to_target: " {{word}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


def test_the_accuracy_is_that_of_our_own_cloze_evaluation(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="pip install 'gptctl[lm-eval]'")
    output = trained(tmp_path)
    texts = [*RIGHT, *WRONG]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (ours,) = json_of(task("evaluate", tmp_path, "output", "words.jsonl", "--cloze", "--json"))
    assert ours["accuracy"] == len(RIGHT) / len(texts)

    environment = {
        **os.environ,
        "HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout

    run("trainer.tasks.export_weights", str(output), "--output", "exported")
    parts = [text.rpartition(" ") for text in texts]
    lines = [json.dumps({"context": context, "word": word}) + "\n" for context, _, word in parts]
    (tmp_path / "parts.jsonl").write_text("".join(lines))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/counting.yaml").write_text(TASK % (tmp_path / "parts.jsonl"))
    # Characters have no end token, which the harness would put before an empty context.
    words = "--model hf --model_args pretrained=exported,prefix_token_id=0 --include_path tasks --tasks counting --device cpu"
    run("lm_eval", *words.split(), "--output_path", "results")
    (file,) = tmp_path.glob("results/**/*.json")
    (accuracy,) = (
        value for name, value in json.loads(file.read_text())["results"]["counting"].items() if name.startswith("acc,")
    )
    assert accuracy == ours["accuracy"]
