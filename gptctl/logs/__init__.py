"""The per-rank logs of a job: read, merge by time, follow and filter them; find who failed first.

    files = LocalLogFiles(log_dir, run_dir)
    show_logs(files, FileFilter(ranks=parse_ranks("0,3")), LineFilter(grep=Grep("loss")), say=say)

`files` defines what a transport must offer, `stream` merges and follows, `printer` writes
lines, `tables` makes the reports. Nothing here imports `gptctl.cli`.
"""

# No imports here: a verb loads only the modules it uses.
