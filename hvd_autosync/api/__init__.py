"""The public Python API: ``hvd_autosync.tune`` and ``hvd_autosync.Study``."""
