"""Keys, ciphers, and the format of encrypted files. Only this room imports `cryptography`."""
