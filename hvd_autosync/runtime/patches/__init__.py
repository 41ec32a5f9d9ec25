"""What is wrapped of torch and Horovod, so that scripts stay as they are."""
