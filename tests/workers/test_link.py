"""The bytes of a link: what goes in comes out, however it was cut, and nothing else does."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from swarmllm_proto.frames import encode_frame
from swarmllm_workers.errors import CallError
from swarmllm_workers.ring.link import LINK_PAYLOAD_MAX, UNSENT_MAX, LinkClosed, ReceivingLink, SendingLink

KEY = bytes(range(32))
SECRET = KEY + (7).to_bytes(8, "little")
"""The next message is number 7."""


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def noise_message(number: int, plaintext: bytes) -> bytes:
    """As the Noise specification has it, written apart from the code under test."""
    sealed = ChaCha20Poly1305(KEY).encrypt(bytes(4) + number.to_bytes(8, "little"), plaintext, None)
    return len(sealed).to_bytes(2, "big") + sealed


def frame(header: bytes, payload: bytes = b"") -> bytes:
    return b"".join(encode_frame(header, payload))


def test_frames_arrive_as_they_were_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    sending, receiving = SendingLink(pair[0], SECRET), ReceivingLink(pair[1], SECRET)
    sending.send(encode_frame(b"one", b"first"))
    sending.send([*encode_frame(b"two", bytes(100_000)), *encode_frame(b"three")])
    received = []
    while len(received) < 3:
        received += [(each.header, bytes(each.payload)) for each in receiving.receive()]
        sending.flush()
    assert received == [(b"one", b"first"), (b"two", bytes(100_000)), (b"three", b"")]


def test_the_bytes_are_noise_messages_under_the_counter(pair: tuple[socket.socket, socket.socket]) -> None:
    sending = SendingLink(pair[0], SECRET)
    sending.send(encode_frame(b"one", b"first"))
    sending.send(encode_frame(b"two"))
    expected = noise_message(7, frame(b"one", b"first")) + noise_message(8, frame(b"two"))
    assert pair[1].recv(4096) == expected


def test_a_message_may_come_byte_by_byte(pair: tuple[socket.socket, socket.socket]) -> None:
    receiving = ReceivingLink(pair[1], SECRET)
    received = []
    for byte in noise_message(7, frame(b"one", b"first")) + noise_message(8, frame(b"two")):
        pair[0].send(bytes((byte,)))
        received += [each.header for each in receiving.receive()]
    assert received == [b"one", b"two"]


@pytest.mark.parametrize("n_late", [1, 10, 40])
def test_what_came_of_a_message_behind_a_whole_one_is_kept_for_later(
    pair: tuple[socket.socket, socket.socket], n_late: int
) -> None:
    receiving = ReceivingLink(pair[1], SECRET)
    content = noise_message(7, frame(b"one", b"first")) + noise_message(8, frame(b"two", bytes(range(100))))
    pair[0].send(content[:-n_late])
    assert [each.header for each in receiving.receive()] == [b"one"]
    pair[0].send(content[-n_late:])
    (second,) = receiving.receive()
    assert (second.header, bytes(second.payload)) == (b"two", bytes(range(100)))


@pytest.mark.parametrize(
    "bytes_",
    [
        pytest.param(noise_message(8, frame(b"later")), id="one was left out"),
        pytest.param(noise_message(6, frame(b"earlier")), id="one came again"),
        pytest.param(noise_message(7, frame(b"one"))[:-1] + b"\0", id="one bit is wrong"),
        pytest.param(b"\0\0", id="no tag"),
    ],
)
def test_what_does_not_decrypt_ends_the_link(
    pair: tuple[socket.socket, socket.socket], bytes_: bytes
) -> None:
    pair[0].send(bytes_)
    receiving = ReceivingLink(pair[1], SECRET)
    for _ in range(2):
        with pytest.raises(LinkClosed, match="do not decrypt"):
            receiving.receive()


def test_a_frame_that_is_too_large_ends_the_link_before_it_is_stored(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    oversized = frame(b"one")[:-4] + (LINK_PAYLOAD_MAX + 1).to_bytes(4, "little")
    pair[0].send(noise_message(7, oversized))
    with pytest.raises(LinkClosed, match="payload"):
        ReceivingLink(pair[1], SECRET).receive()


def test_what_came_before_the_end_is_not_lost(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].send(noise_message(7, frame(b"last words")))
    pair[0].close()
    receiving = ReceivingLink(pair[1], SECRET)
    assert [each.header for each in receiving.receive()] == [b"last words"]
    with pytest.raises(LinkClosed, match="ended by the neighbour"):
        receiving.receive()


def test_a_neighbour_that_does_not_read_is_given_up(pair: tuple[socket.socket, socket.socket]) -> None:
    sending = SendingLink(pair[0], SECRET)
    sending.send(encode_frame(b"fits", bytes(4 * 2**20)))
    assert sending.has_unsent
    for _ in range(UNSENT_MAX // (4 * 2**20) - 1):
        sending.send(encode_frame(b"more", bytes(4 * 2**20)))
    with pytest.raises(LinkClosed, match="does not read"):
        sending.send(encode_frame(b"too much", bytes(4 * 2**20)))


def test_what_was_flushed_counts_no_longer(pair: tuple[socket.socket, socket.socket]) -> None:
    """A neighbour that reads slowly, and reads, may get any number of bytes."""
    sending = SendingLink(pair[0], SECRET)
    pair[1].setblocking(False)
    piece, n_sent = bytes(2**20), 0
    while n_sent < 2 * UNSENT_MAX:
        sending.send_bytes(piece)
        n_sent += len(piece)
        while sending.has_unsent:
            with contextlib.suppress(BlockingIOError):
                while pair[1].recv(2**20):
                    pass
            sending.flush()


def test_the_sending_end_notices_the_end_and_accepts_nothing(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    sending = SendingLink(pair[0], SECRET)
    sending.read_end()
    pair[1].send(b"x")
    with pytest.raises(LinkClosed, match="sent something"):
        sending.read_end()
    pair[1].close()
    with pytest.raises(LinkClosed):
        sending.read_end()


@pytest.mark.parametrize("secret", [b"", KEY, SECRET + b"x"])
def test_a_secret_of_another_size_is_refused(
    pair: tuple[socket.socket, socket.socket], secret: bytes
) -> None:
    with pytest.raises(CallError, match="40 bytes"):
        SendingLink(pair[0], secret)
