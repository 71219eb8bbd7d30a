"""Ports: is one free, and whose is it."""

from __future__ import annotations

import errno
import socket

import psutil

from flatout.engine.diagnosis.finding import Finding
from flatout.engine.parameters import DistributedSettings


def ui_port(number: int, page: str, command: str) -> Finding:
    """`page` is `make ui`; `command` takes another port with --port."""
    name = f"port {number}"
    if is_free(number):
        return Finding(name, "ok", f"free for {page}")
    holder = owner(number)
    other = next(n for n in range(number + 1, 2**16) if is_free(n))
    return Finding(
        name,
        "warn",
        f"{page} needs it, and {holder} has it",
        f"end that process, or take another port: {command} --port {other}",
    )


def rendezvous(settings: DistributedSettings) -> Finding:
    """Where several machines meet: free on machine 0, answering for the others."""
    endpoint = settings.rendezvous_endpoint
    if settings.num_machines == 1 or endpoint is None:
        return Finding("rendezvous", "ok", "one machine: no port is needed")
    host, _, port = endpoint.rpartition(":")
    parameter = "train.distributed.rendezvous_endpoint"
    if not host or not port.isdigit() or int(port) >= 2**16:
        text = f"{endpoint!r} is not host:port"
        return Finding("rendezvous", "fail", text, f"set {parameter}: node0:29500")
    if settings.machine_rank == 0:
        if is_free(int(port), ""):
            return Finding("rendezvous", "ok", f"port {port} of this machine is free")
        text = f"port {port} of this machine: {owner(int(port))} has it"
        fix = (
            f"end that process, or choose another port in {parameter}, on all machines"
        )
        return Finding("rendezvous", "fail", text, fix)
    return _meets(host, int(port))


def _meets(host: str, port: int) -> Finding:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except socket.gaierror:
        fix = "give the address that `hostname -I` shows on machine 0"
        return Finding("rendezvous", "fail", f"{host} is no known name", fix)
    except OSError as error:
        fix = "start machine 0 first, and open the port between the machines"
        return Finding("rendezvous", "warn", f"{host}:{port}: {error}", fix)
    return Finding("rendezvous", "ok", f"{host}:{port} answers")


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def owner(port: int) -> str:
    """`mlflow (process 123)` of who listens there, where this user may know."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        connections = []
    for found in connections:
        listens = found.status == psutil.CONN_LISTEN
        if listens and found.laddr and found.laddr.port == port and found.pid:
            return f"{_name(found.pid)} (process {found.pid})"
    return "a process of another user"


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "a program"
