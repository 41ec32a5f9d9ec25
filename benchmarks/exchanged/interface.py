"""What leaves this host."""

_INTERFACES = "/proc/net/dev"


def sent_bytes(interface: str = "eth0") -> int:
    """Bytes that have left this host through an interface, headers included."""
    with open(_INTERFACES) as lines:
        for line in lines:
            name, _, counters = line.partition(":")
            if name.strip() == interface:
                return int(counters.split()[8])
    return 0
