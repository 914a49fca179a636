"""The names of events, and of the files that have them. Torch-free: gptctl reads them, too."""

EVENTS, LAST_STEP = "events.jsonl", "last-step"
GROUP = "process group"  # all ranks are connected
FIRST_STEP = "first step"  # it begins; `resumed` is the step before it
SAVING = "saving"  # the training begins to wait for a checkpoint
CHECKPOINT = "checkpoint"  # `stall`: seconds for which the training waited until now
COMMITTED = "checkpoint committed"
EVALUATING = "evaluating"  # it begins
EVALUATION = "evaluation"  # it took `seconds` until now
STOP = "stop"  # the training stops because a signal asked it to
FINISHED, FAILED = "finished", "failed"
