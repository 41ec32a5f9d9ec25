"""How gradients travel: buckets, exchanges, codecs, who steps what and when."""
