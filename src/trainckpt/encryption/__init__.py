"""Keys, ciphers, and the format of encrypted files. Only this package imports `cryptography`."""
