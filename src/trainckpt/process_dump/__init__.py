"""Process dumps: save a process tree as images on disk with CRIU, and restore it.

install           installs CRIU from a newer Debian release into a folder of its own
criu              CRIU's command line: find it, check its abilities, dump; restore behind a gate
no_io_uring       starts a command without io_uring, which CRIU cannot dump
process_tree      the tree's processes, open files and connections, and obstacles to a dump
dump              writes images, then the record completing the dump
dump_guard        frees the stopped processes if their supervisor is killed while it dumps
restore           restores the processes, once
encrypted_images  images of an encrypted run
ids_and_ports     process ids and ports the restored tree needs again
gpu_state         sets GPU state aside in host memory and puts it back, with every undo
cuda_driver       NVIDIA's driver, called through a helper process
self_test         dumps and restores two small processes

A dump is tied to its host and versions. It is never the only copy if a snapshot is possible.
"""
