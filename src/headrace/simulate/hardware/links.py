"""Communication between the accelerators of a replica: seconds of one collective."""

from __future__ import annotations

from headrace.simulate.hardware.efficiency import Efficiency
from headrace.simulate.hardware.profiles import Hardware


def all_reduce_s(hardware: Hardware, efficiency: Efficiency, message_bytes: float, members: int) -> float:
    """Sum of a message over all ``members``, at every member.

    In a ring, 2 (n - 1) messages follow one another and carry 2 (n - 1) / n of it over each link (Patarasuk and Yuan,
    Bandwidth optimal all-reduce algorithms, 2009). Where all reach all directly, the same bytes take two messages, or
    the whole message goes to all others in one; the quicker of both.
    """
    if members <= 1:
        return 0.0
    bytes_per_s = _bytes_per_s(hardware, efficiency, message_bytes)
    scattered_s = 2 * (members - 1) / members * message_bytes / bytes_per_s
    if efficiency.ring:
        return 2 * (members - 1) * efficiency.link_latency_s + scattered_s
    whole_s = efficiency.link_latency_s + (members - 1) * message_bytes / bytes_per_s
    return min(whole_s, 2 * efficiency.link_latency_s + scattered_s)


def all_to_all_s(hardware: Hardware, efficiency: Efficiency, sent_bytes: float, members: int) -> float:
    """Each of ``members`` sends ``sent_bytes``, evenly to all of them, itself included."""
    if members <= 1:
        return 0.0
    leaving_bytes = sent_bytes * (members - 1) / members
    return efficiency.link_latency_s + leaving_bytes / _bytes_per_s(hardware, efficiency, sent_bytes)


def _bytes_per_s(hardware: Hardware, efficiency: Efficiency, message_bytes: float) -> float:
    large = efficiency.large_message_bytes is not None and message_bytes > efficiency.large_message_bytes
    return hardware.link_bytes_per_s * (efficiency.large_link if large else efficiency.link)
