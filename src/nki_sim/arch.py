"""trn2 (NeuronCore-v3) in numbers, and the NKI versions that this simulator spans.

Every constant stands here once; checks, README and roofline read it from here.
Sources: AWS's Trainium2 architecture guide, NKI's `tile_size`, DMA bandwidth guide.
"""

PMAX = 128  # partitions of SBUF and PSUM; rows of the multiplier array
SBUF_BYTES = 212_984  # usable bytes a partition: 224 KiB less 16 KiB + 8 B that the runtime keeps
PSUM_BANK_BYTES = 2_048  # a partition's share of one bank: 512 float32
PSUM_BANKS = 8
STATIONARY_FMAX = 128  # columns of the multiplier array
MOVING_FMAX = 512  # one float32 PSUM bank
BN_STATS_FMAX = 512
MAX_RANK = 5  # dimensions of a view, the partition included
MAX_STRIDE = 32_767  # elements between neighbours of a free dimension: int16 in an instruction

# Clock rates and widths of the fastest documented mode: dividing by them gives a lower bound.
PE_HZ = 2.4e9
PE_MIN_COLUMNS = 64  # a matmul occupies the array for at least this many cycles
PE_FLOAT32_PASSES = 4  # float32 is computed in four passes
VECTOR_HZ, VECTOR_LANES_16BIT, VECTOR_LANES = 0.96e9, 512, 256
SCALAR_HZ, SCALAR_LANES = 1.2e9, 128
HBM_BYTES_PER_S = 362e9  # one core's eighth of the chip's 2.9 TB/s
DMA_BYTES_PER_S = 368e9  # 16 queues of 23 B/ns

VERSIONS = ("0.3", "0.4", "0.5", "0.6", "0.7")
DEFAULT_VERSION = "0.7"  # what the SDK 2.33 ships, for which this repository is written


def start_partitions(count):
    """Partitions at which a compute engine's access of `count` partitions may start."""
    return (0, 32, 64, 96) if count <= 32 else (0, 64) if count <= 64 else (0,)
