"""`gptctl doctor`: whether jobs would start right on a cluster, and what to do where they would not.

`judge` says what facts mean, `slurm_side` asks the clients of Slurm, `probe` makes the folder that nodes find their
scripts in and write their facts to; only `slurm_job` and `here` know how commands reach a node.
"""
