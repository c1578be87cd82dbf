#!/usr/bin/env python3
"""Ranks that a real launcher has started find each other by what it tells them: each hears from each.

Run: run.py <mpirun|torchrun|srun> <program> <ranks>. Exit code 77 where the launcher is not installed. For srun a Slurm of
one node is started that lives as long as the test and whose files are in a folder of its own.
"""
import contextlib
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

NAMES = {"mpirun": "Open MPI", "torchrun": "torchrun", "srun": "Slurm"}
SLURM = ("srun", "sinfo", "slurmctld", "slurmd", "munged")
PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"
CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
NodeName={host} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def slurm(cpus):
    """An environment in which srun finds a Slurm of this machine alone."""
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, contextlib.ExitStack() as daemons:
        root = pathlib.Path(folder)
        for name in ("munge", "state", "spool"):
            (root / name).mkdir()
        root.chmod(0o755)
        (root / "munge").chmod(0o711)
        (root / "munge/key").write_bytes(os.urandom(1024))
        (root / "munge/key").chmod(0o400)
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        (root / "slurm.conf").write_text(CONFIGURATION.format(host=socket.gethostname(), folder=root, user=user, cpus=cpus,
                                                              ports=free_ports(2)))
        environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(root / "slurm.conf")}

        def start(*command):
            log = daemons.enter_context(open(root / f"{command[0]}.log", "w"))
            started = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            daemons.callback(lambda: (started.terminate(), started.wait()))

        munge = root / "munge"
        start("munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket", f"--pid-file={munge}/pid",
              f"--log-file={munge}/log", f"--seed-file={munge}/seed")
        while_not(lambda: (munge / "socket").exists(), "munged")
        start("slurmctld", "-D")
        start("slurmd", "-D")
        while_not(lambda: "idle" in subprocess.run(["sinfo", "--noheader"], env=environment, capture_output=True, text=True).stdout,
                  "Slurm", root)
        yield environment


def while_not(ready, what, folder=None):
    until = time.monotonic() + 60
    while not ready():
        if time.monotonic() > until:
            logs = [path.read_text() for path in folder.glob("*.log")] if folder else []
            sys.exit(f"{what} does not start\n" + "\n".join(logs))
        time.sleep(0.1)


def launched(launcher, program, ranks):
    """What all ranks print."""
    def run(command, environment):
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\n{done.stdout}")
        return done.stdout

    if launcher == "mpirun":
        return run(["mpirun", "-np", ranks, program], os.environ)
    if launcher == "torchrun":
        return run(["torchrun", "--no-python", "--nproc-per-node", ranks, "--master-port", str(free_ports(1)[0]), program], os.environ)
    with slurm(cpus=ranks) as environment:
        return run(["srun", "--ntasks", ranks, program], environment)


def main(launcher, program, ranks):
    missing = [name for name in (SLURM if launcher == "srun" else (launcher,)) if not shutil.which(name, path=PATH)]
    if missing:
        print(f"skipped: not installed: {' '.join(missing)}")
        sys.exit(77)
    output = launched(launcher, program, ranks)
    print(output, end="")
    for rank in range(int(ranks)):
        heard = "".join(f" {100 * peer + rank}" for peer in range(int(ranks)) if peer != rank)
        if not re.search(rf"^{NAMES[launcher]} rank {rank} of {ranks}, local {rank}, heard{heard}$", output, re.M):
            sys.exit(f"rank {rank} does not say that it heard{heard}")


if __name__ == "__main__":
    main(*sys.argv[1:])
