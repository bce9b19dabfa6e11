"""The ``k31`` command."""
