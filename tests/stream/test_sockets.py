"""The sockets over real loopback TCP: order, loss, refusal, deadlines.

Peers that must die without a goodbye are processes; the others are tasks or threads of the test.
"""

from __future__ import annotations

import asyncio
import signal
import socket as tcp
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager

import numpy as np
import pytest
import zmq

from asyncrl.errors import ConfigError, PeerLost, WireError
from asyncrl.stream.codec import Limits, decode, group_fields
from asyncrl.stream.connections import BlockingConnection, Connection
from asyncrl.stream.envelope import Envelope, SequenceCheck, SequenceGap
from asyncrl.stream.messages import (
    Acknowledged,
    Bye,
    Failed,
    GroupFinished,
    RankHello,
    RankWelcome,
    ServerHello,
    ServerWelcome,
    Stop,
)
from asyncrl.stream.sockets import LINGER_MS, MAX_QUEUED_MESSAGES, Listener, join_address, parse_address
from asyncrl.types import Status, Trajectory, TrajectoryGroup

MAX_BYTES = 1 << 22
HELLO = ServerHello("digest", 4, 1 << 20)
DEADLINE_S = 30.0


def envelope(sender: str, *, known: bool = False, max_message_bytes: int = MAX_BYTES) -> Envelope:
    names = {"run": "r-1", "incarnation": "i-1"} if known else {}
    return Envelope(sender, max_message_bytes=max_message_bytes, **names)


def limits(*, known: bool = False) -> Limits:
    made = Limits(vocab_size=100, group_size=1, max_prompt_tokens=8, max_completion_tokens=1 << 20)
    if known:
        made.run, made.incarnation = "r-1", "i-1"
    return made


def listener(bind: str = "127.0.0.1", port: int = 0, heartbeat_s: float = 5.0) -> Listener:
    return Listener(bind, port, max_message_bytes=MAX_BYTES, heartbeat_s=heartbeat_s)


def connection(address: str, sender: str = "server-a", connect_s: float = 10.0) -> Connection:
    return Connection(address, envelope(sender), limits(), heartbeat_s=5.0, connect_s=connect_s)


def blocking(address: str, connect_s: float = 10.0, heartbeat_s: float = 5.0) -> BlockingConnection:
    return BlockingConnection(
        address, envelope("rank-0"), limits(), heartbeat_s=heartbeat_s, connect_s=connect_s
    )


def group(num_tokens: int) -> TrajectoryGroup:
    t = Trajectory(
        np.arange(num_tokens, dtype=np.int32) % 100,
        np.ones(num_tokens, np.uint8),
        np.full(num_tokens, -1, np.float32),
        np.zeros(num_tokens, np.int32),
        1.0,
        Status.SCORED,
        "stop",
    )
    return TrajectoryGroup(0, 0, np.array([1], np.int32), [t])


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Listener, Connection]]:
    async with asyncio.timeout(DEADLINE_S), listener() as ours, connection(ours.address) as theirs:
        yield ours, theirs


def free_port(bind: str = "127.0.0.1") -> int:
    with tcp.socket(tcp.AF_INET6 if ":" in bind else tcp.AF_INET) as probe:
        probe.bind((bind, 0))
        return probe.getsockname()[1]


COORDINATOR = """
import sys, zmq
from asyncrl.stream.envelope import Envelope
from asyncrl.stream.messages import Acknowledged, ServerWelcome
socket = zmq.Context().socket(zmq.ROUTER)
print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
peer = socket.recv_multipart()[0]
envelope = Envelope("coordinator", max_message_bytes=1 << 20, run="r-1", incarnation="i-1")
socket.send_multipart([peer, *envelope.seal(ServerWelcome())])
for ordinal in range(int(sys.argv[1])):
    socket.send_multipart([peer, *envelope.seal(Acknowledged([(ordinal, 0)]))])
print("sent", flush=True)
sys.stdin.read()
"""


@contextmanager
def coordinator_process(num_messages: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A coordinator that welcomes one peer and sends it messages, then waits to be killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", COORDINATOR, str(num_messages)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


# Addresses ---------------------------------------------------------------------------------------


def test_an_address_is_host_and_port() -> None:
    assert parse_address("127.0.0.1:5") == ("127.0.0.1", 5)
    assert parse_address("localhost:65535") == ("localhost", 65535)
    assert parse_address("[::1]:5") == ("::1", 5)
    assert join_address(*parse_address("[::1]:5")) == "[::1]:5"


@pytest.mark.parametrize(
    "address",
    [
        "",
        "5",
        ":5",
        "localhost",
        "::1:5",
        "[::1]",
        "[::1]5",
        "[x]:5",
        "[1:2]:5",
        "h:0",
        "h:65536",
        "h:x",
        "a b:5",
    ],
)
def test_another_address_is_refused_with_the_address(address: str) -> None:
    with pytest.raises(ConfigError, match="is not HOST:PORT") as caught:
        parse_address(address)
    assert repr(address) in str(caught.value)


async def exchange(bind: str, host: str) -> str:
    async with asyncio.timeout(DEADLINE_S), listener(bind) as ours:
        port = parse_address(ours.address)[1]
        async with connection(join_address(host, port)) as theirs:
            await theirs.send(HELLO)
            peer, frames = await ours.recv()
            await ours.send(peer, envelope("coordinator", known=True).seal(ServerWelcome()))
            assert (await theirs.recv()).body == ServerWelcome()
            assert decode(frames, limits(known=True), peer=peer).body == HELLO
    return ours.endpoint


def has_ipv6() -> bool:
    try:
        return free_port("::1") > 0
    except OSError:
        return False


@pytest.mark.parametrize(
    ("bind", "host"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "localhost"), ("::1", "::1"), ("::1", "localhost")],
)
def test_loopback_is_reached_by_every_name(bind: str, host: str) -> None:
    if ":" in bind and not has_ipv6():
        pytest.skip("this host has no IPv6")
    if (
        ":" in bind
        and host == "localhost"
        and not any(entry[0] == tcp.AF_INET6 for entry in tcp.getaddrinfo(host, 1))
    ):
        pytest.skip("localhost has no IPv6 address here")
    endpoint = asyncio.run(exchange(bind, host))
    assert endpoint.startswith(f"tcp://{join_address(bind, '')}")
    assert int(endpoint.rsplit(":", 1)[1]) > 0


def test_a_busy_port_is_named_with_its_key() -> None:
    async def run() -> None:
        async with listener() as first:
            port = parse_address(first.address)[1]
            with pytest.raises(ConfigError, match=rf"stream\.port: {port} is in use on 127\.0\.0\.1"):
                async with listener(port=port):
                    pass
        async with listener(port=port) as again:  # the failed one left nothing behind
            assert again.address == f"127.0.0.1:{port}"

    asyncio.run(run())


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    async def run() -> None:
        async with listener("192.0.2.1"):
            pass

    with pytest.raises(ConfigError, match=r"stream\.bind: '192\.0\.2\.1'"):
        asyncio.run(run())


# Order and volume --------------------------------------------------------------------------------

NUM_MESSAGES = 2_000


def test_order_is_kept_both_ways_at_once() -> None:
    # A lost wake-up would hang this until its deadline; SequenceCheck sees any gap.
    async def run() -> tuple[list[int], list[int]]:
        there: list[int] = []
        back: list[int] = []
        credits = asyncio.Semaphore(MAX_QUEUED_MESSAGES // 2)
        async with pair() as (ours, theirs):
            await theirs.send(HELLO)
            peer, frames = await ours.recv()
            check = SequenceCheck()
            decode(frames, limits(), peer=peer, on_header=check.check)
            sealer = envelope("coordinator", known=True)
            await ours.send(peer, sealer.seal(ServerWelcome()))
            await theirs.recv()

            async def coordinator_reads() -> None:
                while len(there) < NUM_MESSAGES:
                    who, read = await ours.recv()
                    body = decode(read, limits(known=True), peer=who, on_header=check.check).body
                    assert isinstance(body, Failed)
                    there.append(int(body.error))

            async def coordinator_writes() -> None:
                for n in range(NUM_MESSAGES):
                    await credits.acquire()  # so that the queue never fills
                    await ours.send(peer, sealer.seal(Acknowledged([(n, 0)])))

            async def server_reads() -> None:
                while len(back) < NUM_MESSAGES:
                    body = (await theirs.recv()).body
                    assert isinstance(body, Acknowledged)
                    back.append(body.groups[0][0])
                    credits.release()

            async def server_writes() -> None:
                for n in range(NUM_MESSAGES):
                    await theirs.send(Failed(str(n), ""))

            async with asyncio.TaskGroup() as tasks:
                for work in (coordinator_reads, coordinator_writes, server_reads, server_writes):
                    tasks.create_task(work())
        return there, back

    there, back = asyncio.run(run())
    assert there == list(range(NUM_MESSAGES))
    assert back == list(range(NUM_MESSAGES))


def test_a_coordinator_slower_than_the_high_water_mark_loses_nothing() -> None:
    # Mutation caught: a message given up where there is no room, instead of waiting for it.
    num_messages = 4 * MAX_QUEUED_MESSAGES
    padding = "x" * 16_384  # 32 MB beyond the two queues: more than TCP's own buffers hold

    async def run() -> list[int]:
        got: list[int] = []
        async with pair() as (ours, theirs):

            async def write() -> None:
                for n in range(num_messages):
                    await theirs.send(Failed(str(n), padding))
                sent.set()

            sent = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(write())
                await asyncio.sleep(0.3)
                assert not sent.is_set()  # it waits for room, and the loop goes on meanwhile
                for _ in range(num_messages):
                    body = decode((await ours.recv())[1], limits()).body
                    assert isinstance(body, Failed)
                    got.append(int(body.error))
        return got

    assert asyncio.run(run()) == list(range(num_messages))


def test_a_peer_that_never_reads_is_lost_at_once_when_its_queue_is_full_and_holds_up_no_other() -> None:
    # Mutation caught: waiting for room (heartbeat_s is beyond the test's deadline); ROUTER_MANDATORY off,
    # which drops what does not fit.
    async def run() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            listener(heartbeat_s=10 * DEADLINE_S) as ours,
            connection(ours.address, "deaf") as deaf,
            connection(ours.address, "alert") as alert,
        ):
            await deaf.send(HELLO)
            await alert.send(HELLO)
            await ours.recv()
            await ours.recv()
            sealers = {name: envelope("coordinator", known=True) for name in (b"deaf", b"alert")}
            num_sent = 0
            with pytest.raises(PeerLost, match="peer b'deaf' leaves 1000 messages waiting"):  # noqa: PT012
                for _ in range(10 * MAX_QUEUED_MESSAGES):
                    await ours.send(b"deaf", sealers[b"deaf"].seal(Stop("x" * 65_536)))
                    num_sent += 1
            assert num_sent >= MAX_QUEUED_MESSAGES
            for _ in range(20):
                await ours.send(b"alert", sealers[b"alert"].seal(Stop()))
                await alert.recv()

    asyncio.run(run())


def test_a_group_crosses_the_stream_unchanged() -> None:
    sent = group(50_000)

    async def run() -> None:
        async with pair() as (ours, theirs):
            await theirs.send(HELLO)
            await ours.recv()
            theirs._link.envelope.run, theirs._link.envelope.incarnation = "r-1", "i-1"
            await theirs.send(GroupFinished(group_fields(sent)), [sent])
            peer, frames = await ours.recv()
            assert all(isinstance(frame, memoryview) for frame in frames)
            received = decode(frames, limits(known=True), peer=peer).groups[0]
            assert np.array_equal(received.trajectories[0].token_ids, sent.trajectories[0].token_ids)
            assert np.shares_memory(received.trajectories[0].token_ids, np.frombuffer(frames[2], np.uint8))

    asyncio.run(run())


def test_the_first_message_tells_a_connection_its_run_and_incarnation() -> None:
    async def run() -> None:
        async with pair() as (ours, theirs):
            await theirs.send(HELLO)
            peer, _ = await ours.recv()
            sealer = envelope("coordinator", known=True)
            await ours.send(peer, sealer.seal(ServerWelcome()))
            await theirs.recv()
            await theirs.send(Bye())
            header = decode((await ours.recv())[1], limits(known=True)).header
            assert (header.run, header.incarnation, header.sequence) == ("r-1", "i-1", 1)
            sealer.incarnation = "i-2"
            await ours.send(peer, sealer.seal(Stop()))
            with pytest.raises(WireError, match=r"incarnation is 'i-2': .* 'i-1' \(from 'coordinator'\)"):
                await theirs.recv()

    asyncio.run(run())


def test_a_missing_message_is_noticed_by_the_connection() -> None:
    async def run() -> None:
        async with pair() as (ours, theirs):
            await theirs.send(HELLO)
            peer, _ = await ours.recv()
            sealer = envelope("coordinator", known=True)
            await ours.send(peer, sealer.seal(ServerWelcome()))
            sealer.seal(Stop())  # made, never sent
            await ours.send(peer, sealer.seal(Stop()))
            await theirs.recv()
            with pytest.raises(SequenceGap, match="gap: sequence is 2, expected 1"):
                await theirs.recv()

    asyncio.run(run())


def test_an_oversize_message_is_refused_by_its_sender_and_the_connection_lives() -> None:
    big = group(MAX_BYTES // 13)

    async def run() -> None:
        async with pair() as (ours, theirs):
            await theirs.send(HELLO)
            with pytest.raises(WireError, match=rf"exceeds stream\.max_message_bytes {MAX_BYTES}"):
                await theirs.send(GroupFinished(group_fields(big)), [big])
            await theirs.send(Bye())
            check = SequenceCheck()
            for _ in range(2):
                decode((await ours.recv())[1], limits(), on_header=check.check)

    asyncio.run(run())


# Loss --------------------------------------------------------------------------------------------


def in_time(call: Callable[[], object]) -> float:
    """Seconds that the call took; fails the test where it takes longer than the deadline."""
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        pool.submit(call).result(timeout=DEADLINE_S)
        return time.monotonic() - began


def test_a_killed_coordinator_is_lost_after_all_that_it_sent_is_delivered() -> None:
    # Mutation caught: loss looked at before the socket; socket closed at the loss without emptying it.
    async def run() -> None:
        with coordinator_process(num_messages=500) as (process, address):
            async with asyncio.timeout(DEADLINE_S), connection(address) as theirs:
                await theirs.send(HELLO)
                assert (await theirs.recv()).body == ServerWelcome()
                assert process.stdout is not None
                await asyncio.to_thread(process.stdout.readline)
                for n in range(100):
                    assert (await theirs.recv()).body == Acknowledged([(n, 0)])
                await asyncio.sleep(0.3)  # the rest is on this side by now, unread
                process.kill()
                await asyncio.to_thread(process.wait)
                for n in range(100, 500):
                    assert (await theirs.recv()).body == Acknowledged([(n, 0)])
                with pytest.raises(PeerLost, match=f"the coordinator {address} is gone"):
                    await theirs.recv()
                with pytest.raises(PeerLost, match="is gone"):
                    await theirs.send(Bye())

    asyncio.run(run())


def test_a_killed_coordinator_ends_a_blocking_wait_at_once() -> None:
    def run() -> None:
        with coordinator_process(num_messages=3) as (process, address), blocking(address) as rank:
            rank.send(RankHello("digest", 0, 1))
            assert rank.recv(DEADLINE_S).body == ServerWelcome()
            killer = threading.Timer(0.3, process.kill)
            killer.start()
            got = [rank.recv(DEADLINE_S).body for _ in range(3)]
            assert got == [Acknowledged([(n, 0)]) for n in range(3)]
            with pytest.raises(PeerLost, match=f"the coordinator {address} is gone"):
                rank.recv(10 * DEADLINE_S)
            with pytest.raises(PeerLost, match="is gone"):
                rank.send(Bye())
            killer.join()

    in_time(run)


@pytest.mark.parametrize("kind", [signal.SIGSTOP])
def test_a_stopped_coordinator_is_noticed_by_the_heartbeats_of_the_socket(kind: signal.Signals) -> None:
    # Mutation caught: HEARTBEAT_IVL or HEARTBEAT_TIMEOUT left at ZeroMQ's default (off).
    def run() -> None:
        with coordinator_process() as (process, address), blocking(address, heartbeat_s=0.6) as rank:
            rank.send(RankHello("digest", 0, 1))
            rank.recv(DEADLINE_S)
            process.send_signal(kind)
            with pytest.raises(PeerLost, match="is gone"):
                rank.recv(DEADLINE_S)

    in_time(run)


def test_a_blocking_recv_ends_at_its_deadline() -> None:
    def run() -> None:
        with coordinator_process() as (_, address), blocking(address) as rank:
            rank.send(RankHello("digest", 0, 1))
            rank.recv(DEADLINE_S)
            for timeout_s in (0.0, 0.05):
                with pytest.raises(TimeoutError, match=rf"{address} sent nothing for {timeout_s:g} s"):
                    rank.recv(timeout_s)

    in_time(run)


def test_nobody_at_the_address_is_an_error_that_names_it() -> None:
    address = f"127.0.0.1:{free_port()}"
    expected = rf"{address} was not reached within 0\.3 s \(timeouts\.connect_s\): the connection was refused"

    async def run() -> None:
        async with connection(address, connect_s=0.3):
            pass

    with pytest.raises(PeerLost, match=expected):
        asyncio.run(run())

    def run_blocking() -> None:
        with pytest.raises(PeerLost, match=expected), blocking(address, connect_s=0.3):
            pass

    in_time(run_blocking)


def test_something_else_at_the_address_is_not_taken_for_a_coordinator() -> None:
    with tcp.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"

        def run() -> None:
            with (
                pytest.raises(PeerLost, match="does not answer as a coordinator does"),
                blocking(address, connect_s=0.3),
            ):
                pass

        in_time(run)


def test_a_coordinator_that_starts_later_is_still_reached() -> None:
    async def run() -> None:
        port = free_port()

        async def late() -> None:
            await asyncio.sleep(0.4)
            async with listener(port=port) as ours:
                peer, frames = await ours.recv()
                assert peer == b"server-a"
                assert decode(frames, limits(), peer=peer).body == HELLO

        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(late())
            async with connection(f"127.0.0.1:{port}") as theirs:
                await theirs.send(HELLO)

    asyncio.run(run())


def test_a_name_that_nobody_knows_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"'no-such-host\.invalid:5' cannot be resolved"):
        blocking("no-such-host.invalid:5").__enter__()


def test_sending_to_a_peer_that_left_is_an_error_at_once() -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), listener() as ours:
            stop = envelope("coordinator", known=True).seal(Stop())
            with pytest.raises(PeerLost, match="b'nobody' is not connected"):
                await ours.send(b"nobody", stop)
            async with connection(ours.address) as theirs:
                await theirs.send(HELLO)
                peer, _ = await ours.recv()
                await ours.send(peer, stop)
            with pytest.raises(PeerLost, match="b'server-a' is not connected"):  # noqa: PT012
                while True:
                    await ours.send(peer, stop)
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_peer_that_comes_back_under_its_name_takes_over_from_its_old_connection() -> None:
    # Mutation caught: ROUTER_HANDOVER off, with which the second connection gets nothing.
    async def run() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            listener() as ours,
            connection(ours.address) as old,
        ):
            await old.send(HELLO)
            await ours.recv()
            async with connection(ours.address) as new:
                await new.send(HELLO)
                peer, frames = await ours.recv()
                check = SequenceCheck()
                decode(frames, limits(), peer=peer, on_header=check.check)
                await ours.send(peer, envelope("coordinator", known=True).seal(ServerWelcome()))
                assert (await new.recv()).body == ServerWelcome()

    asyncio.run(run())


def test_the_last_message_before_closing_arrives() -> None:
    padding = "x" * 50_000

    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), listener() as ours:
            async with connection(ours.address) as theirs:
                await theirs.send(HELLO)
                for n in range(200):
                    await theirs.send(Failed(str(n), padding))
            assert decode((await ours.recv())[1], limits()).body == HELLO
            for n in range(200):
                body = decode((await ours.recv())[1], limits()).body
                assert isinstance(body, Failed)
                assert body.error == str(n)

    asyncio.run(run())


def test_closing_with_a_message_that_nobody_takes_ends() -> None:
    # Mutation caught: LINGER -1, ZeroMQ's default, with which closing waits for ever.
    def run() -> None:
        with coordinator_process() as (process, address), blocking(address, heartbeat_s=60.0) as rank:
            rank.send(RankHello("digest", 0, 1))
            rank.recv(DEADLINE_S)
            process.send_signal(signal.SIGSTOP)
            for _ in range(200):
                rank.send(Failed("x", "x" * 100_000))

    in_time(run)
    assert 0 < LINGER_MS <= 5_000


def test_a_connection_whose_end_is_cancelled_leaves_no_socket_open() -> None:
    # Mutation: close the sockets in the thread that waits for the last messages: cancelled before it starts, it
    # leaves them open, and the context waits for ever when it is collected.
    async def scenario() -> None:
        async with listener() as ours:
            may_end, connected, thread_may_go_on = asyncio.Event(), asyncio.Event(), threading.Event()
            opened = connection(ours.address)

            async def connect() -> None:
                async with opened:
                    connected.set()
                    await may_end.wait()

            task = asyncio.ensure_future(connect())
            await connected.wait()
            threads = ThreadPoolExecutor(1)
            asyncio.get_running_loop().set_default_executor(threads)
            threads.submit(thread_may_go_on.wait)  # the only thread is busy
            try:
                may_end.set()
                await asyncio.sleep(0)  # it is on its way out
                await asyncio.sleep(0)
                task.cancel()
                ended = await asyncio.gather(task, return_exceptions=True)
                assert isinstance(ended[0], asyncio.CancelledError)
                assert opened._link.socket.closed
                assert opened._link.monitor.closed
            finally:
                thread_may_go_on.set()
                opened._link.close()

    asyncio.run(scenario())


def test_every_option_is_set_and_not_inherited() -> None:
    # Mutation caught: any of them left out or changed (LINGER 0 shows in no other test).
    expected = {
        "LINGER": 1000,
        "SNDHWM": 1000,
        "RCVHWM": 1000,
        "MAXMSGSIZE": MAX_BYTES,
        "IPV6": 0,
        "HEARTBEAT_IVL": 1666,
        "HEARTBEAT_TIMEOUT": 5000,
        "HEARTBEAT_TTL": 5000,
        "HANDSHAKE_IVL": 5000,
    }

    async def run() -> tuple[dict[str, object], dict[str, object]]:
        async with pair() as (ours, theirs):
            names = list(expected)
            sockets = ours._socket, theirs._link.socket
            return tuple({n: s.getsockopt(getattr(zmq, n)) for n in names} for s in sockets)  # type: ignore[return-value]

    assert asyncio.run(run()) == (expected, expected)


def test_hostile_bytes_reach_decode_and_stop_there() -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), listener() as ours:
            context = zmq.Context()
            stranger = context.socket(zmq.DEALER)
            stranger.linger = 0
            try:
                stranger.connect(ours.endpoint)
                await asyncio.to_thread(stranger.send_multipart, [b"\xc1junk", b"more"])
                peer, frames = await ours.recv()
                with pytest.raises(WireError):
                    decode(frames, limits(), peer=peer)
            finally:
                context.destroy(linger=0)

    asyncio.run(run())


def test_a_welcome_reaches_a_rank() -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), listener() as ours:

            def rank() -> object:
                with blocking(ours.address) as connected:
                    connected.send(RankHello("digest", 0, 1))
                    return connected.recv(DEADLINE_S).body

            answer = asyncio.create_task(asyncio.to_thread(rank))
            peer, _ = await ours.recv()
            await ours.send(peer, envelope("coordinator", known=True).seal(RankWelcome()))
            assert await answer == RankWelcome()

    asyncio.run(run())
