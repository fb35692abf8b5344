"""Messages and files between the agent and its fork server."""

import threading

from fsdplaunch.channel import open_channel


def test_message_larger_than_the_sockets_buffer_arrives_whole():
    here, there = open_channel()
    text = "x" * 5_000_000
    sender = threading.Thread(target=here.send, args=({"text": text},))
    sender.start()
    assert there.receive() == ({"text": text}, [])
    sender.join()


def test_end_of_the_other_side_is_none_also_where_it_left_a_message_unread():
    here, there = open_channel()
    here.send({"last": True})
    there.send({"never": "read"})
    here.close()
    assert there.receive() == ({"last": True}, [])
    assert there.receive() is None
