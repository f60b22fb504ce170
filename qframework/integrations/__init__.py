"""Support for other libraries through their own registries, registered when such a library is imported."""
