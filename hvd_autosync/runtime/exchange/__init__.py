"""The exchange of gradients: buckets, exchanges, codecs, ZeRO steps, deferred updates."""
