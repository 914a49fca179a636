"""The accounting that `sacct` needs: slurmdbd with its own MariaDB. It starts more slowly than all the rest."""

from __future__ import annotations

from pathlib import Path

from tests.lab.machines import HEAD_ADDRESS, Machines, await_true

SLURMDBD_CONF = """\
AuthType=auth/munge
DbdHost=head
DbdAddr={address}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm
LogFile={folder}/log/slurmdbd.log
PidFile={folder}/run/slurmdbd.pid
"""
SQL = """\
create database slurm;
create user slurm@localhost identified by 'slurm';
grant all on slurm.* to slurm@localhost;
"""
SOCKET = "/run/mysqld/mysqld.sock"
# The data need not survive a crash, so MariaDB may skip its syncs.
MARIADB = f"""
--user=mysql --socket={SOCKET} --skip-networking --skip-name-resolve --performance-schema=off
--innodb-buffer-pool-size=64M --innodb-log-file-size=8M --innodb-flush-log-at-trx-commit=0
--innodb-lock-wait-timeout=900 --sync-binlog=0
""".split()


class Accounting:
    def __init__(self, machines: Machines) -> None:
        self.machines, self.folder = machines, machines.folder
        self._pid_file = self.folder / "run" / "slurmdbd.pid"
        self._conf = self.folder / "etc" / "slurm" / "slurmdbd.conf"

    def open(self) -> None:
        """Create a database and start slurmdbd."""
        self._conf.touch(mode=0o600)
        self._conf.write_text(SLURMDBD_CONF.format(folder=self.folder, address=HEAD_ADDRESS))
        init = self.folder / "etc" / "database.sql"
        init.write_text(SQL)
        data = f"--datadir={self.folder}/private/head/database"  # in memory, as all of the head's own folders are
        options = ["--no-defaults", data, *MARIADB]
        root = "--auth-root-authentication-method=normal"
        self.machines.run("head", "chown", "mysql:", str(Path(SOCKET).parent), check=True)
        self.machines.daemon("head", "mariadb-install-db", *options, "--skip-test-db", root)
        self.machines.daemon("head", "setsid", "--fork", "mariadbd", *options, f"--init-file={init}")
        await_true(lambda: not self.machines.run("head", "test", "-S", SOCKET).returncode, "the database listens")
        self.start()

    def start(self) -> None:
        self.machines.daemon("head", "slurmdbd", env={"SLURM_CONF": str(self._conf.with_name("slurm.conf"))})
        await_true(
            lambda: not self.machines.run("head", "sacctmgr", "-n", "list", "cluster").returncode, "slurmdbd answers"
        )

    def stop(self) -> None:
        pid = self._pid_file.read_text().strip()
        self.machines.run("head", "kill", pid, check=True)
        await_true(lambda: self.machines.run("head", "kill", "-0", pid).returncode, "slurmdbd has ended")
        self._pid_file.unlink(missing_ok=True)

    @property
    def stopped(self) -> bool:
        return not self._pid_file.exists()
