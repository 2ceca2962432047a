"""Archives and shards of PEFT folders, made by Python's own tools."""

import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Iterable, Mapping

from backports import zstd
from safetensors.numpy import save

from tests.adapters.making import Tensors, config, tensors, weights

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INDEX = "adapter_model.safetensors.index.json"
KINDS = ("zip", "stored", "tar", "gz", "zst", "pax", "ustar")

Members = Mapping[str, bytes] | Iterable[tuple[str, bytes]]


def files(prefix: str = "") -> dict[str, bytes]:
    """The two files of a good adapter."""
    return {prefix + CONFIG: json.dumps(config()).encode(), prefix + WEIGHTS: weights()}


def pairs(members: Members) -> list[tuple[str, bytes]]:
    return list(members.items() if isinstance(members, Mapping) else members)


def zipped(members: Members, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in pairs(members):
            archive.writestr(name, content)
    return file.getvalue()


def tarred(members: Members, form: int = tarfile.GNU_FORMAT) -> bytes:
    return tar_of([(named(name), content) for name, content in pairs(members)], form)


def named(name: str, **fields: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(member, field, value)
    return member


def tar_of(
    members: Iterable[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.GNU_FORMAT
) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def packed_as(kind: str, members: Members) -> bytes:
    match kind:
        case "zip":
            return zipped(members)
        case "stored":
            return zipped(members, zipfile.ZIP_STORED)
        case "gz":
            return gzip.compress(tarred(members))
        case "zst":
            return zstd.compress(
                tarred(members), options={zstd.CompressionParameter.checksum_flag: 1}
            )
        case "pax":
            return tarred(members, tarfile.PAX_FORMAT)
        case "ustar":
            return tarred(members, tarfile.USTAR_FORMAT)
        case _:
            return tarred(members)


def sharded(count: int, made: Tensors | None = None) -> dict[str, bytes]:
    """The weights in `count` shards, dealt out in turn, with their index."""
    made = tensors() if made is None else made
    names = list(made)
    where: dict[str, str] = {}
    written: dict[str, bytes] = {}
    for shard in range(count):
        file = f"adapter_model-{shard + 1:05}-of-{count:05}.safetensors"
        part = {name: made[name] for name in names[shard::count]}
        written[file] = save(part, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    return {INDEX: json.dumps(index).encode(), **written}
