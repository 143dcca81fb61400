"""Process dumps: a tree of processes as images on disk, and back, by CRIU.

install      CRIU from a newer Debian release, into a folder of its own
criu         its command line: found, asked what it can do here, told what to do
no_io_uring  starts a command that cannot open what CRIU cannot dump
tree         what the processes hold open, and what of it forbids a dump: mostly pure
dump         images, then the record that makes them a dump
restore      the same processes again, once
gpus         the order in which what is on GPUs is set aside and put back, and every undo
gpu_tree     that, for one tree; gpu_signs reads /proc for it
cuda_driver  NVIDIA's driver, asked through the program cuda_helper

A dump is tied to its host and versions, and is never the only copy where a snapshot can be had.
"""
