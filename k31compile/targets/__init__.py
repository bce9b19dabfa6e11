"""A graph of ATen and k31 operators becomes something to call, one file a target."""
