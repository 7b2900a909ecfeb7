import socket

from weft.cli.listener import listen


def test_no_part_of_an_answer_waits_until_the_one_before_is_confirmed() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
