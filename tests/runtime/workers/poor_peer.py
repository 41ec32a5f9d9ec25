"""A rank that answers others and may open 64 files: ``poor_peer.py SECRET``; prints its address."""

import resource
import sys
import threading

from hvd_autosync.runtime.collectives import state_rpc as module

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    module.rank = lambda: 0
    module.size = lambda: 2
    module.tell_all = lambda text, name: bytes.fromhex(sys.argv[1])
    module.own_address = lambda name: "127.0.0.1"
    module.on_all = lambda make, *_: make()

    def tell(own, name):
        print(own, flush=True)
        return [own, own]

    module.gather_texts = tell
    module.StateServer("test", lambda: b"poor")
    threading.Event().wait()
