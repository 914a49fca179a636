"""`gptctl doctor`: check that a cluster can run jobs, and suggest fixes.

`examine` checks one cluster. `probe` creates the folder with the scripts for the nodes, which
write facts to it; `node_rows` turns these facts into rows. `slurm_checks` queries Slurm itself.
Only `local_node`, `slurm_job` and `ssh_hosts` know how a command reaches a node.
"""
