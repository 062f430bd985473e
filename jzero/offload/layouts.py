"""What rests outside of the device, as layouts say it: each offload is another first or last step of a move."""

from collections.abc import Mapping

from jax.sharding import Mesh

from jzero.host_grads import grads_on_host
from jzero.host_params import on_host
from jzero.look import Seen
from jzero.offload.in_files import read_from_files
from jzero.offload.param_reads import ParamReads
from jzero.placement import Offload
from jzero.zero import Layout, Path, Zero


def offloaded(
    layouts: Mapping[Path, Layout], offload: Offload, seen: Seen, zero: Zero, mesh: Mesh
) -> tuple[dict[Path, Layout], ParamReads]:
    """`layouts` with parameters and gradients where they are to rest, and what programs call of those in files.

    Args:
        seen: the model, of whose parameters the layouts are.
        zero: as they were made with.

    Raises:
        ShardingError: they cannot rest there.
    """
    leaves, trained, least = seen.leaves(), seen.trained(), offload.min_param_bytes
    after, reads = dict(layouts), ParamReads(mesh, {}, {})
    if offload.params == "host":
        after = on_host(after, leaves, zero, least)
    if offload.params == "nvme":
        after, reads = read_from_files(after, leaves, trained, zero, least, seen.params, mesh)
    if offload.grads == "host":
        after |= grads_on_host(after, [leaf for leaf in leaves if leaf.path in trained], least)
    return after, reads
