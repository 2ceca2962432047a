"""Archives: what real tools pack is taken as the two files are, and what is broken is refused.

The broken ones are made by hand, one for each rule, and by a seeded generator.
"""

import gzip
import io
import random
import stat
import struct
import subprocess
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from backports import zstd

from gateway.adapters.archive import unpack
from gateway.adapters.draft import check_draft
from gateway.adapters.members import MEMBERS_MAX
from gateway.errors import ApiError, InvalidAdapter, TooLarge
from tests.adapters.conftest import UPLOAD_BYTES_MAX, Site
from tests.adapters.making import INFO, write_folder
from tests.adapters.packing import (
    CONFIG,
    KINDS,
    WEIGHTS,
    files,
    named,
    packed_as,
    pairs,
    tar_of,
    tarred,
    zipped,
)
from tests.live import error_of

GOOD = files()
MORE = {"README.md": b"hello", "tokenizer.json": b"{}", "nested.zip": zipped(GOOD)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", ["", "./", "top/", "./top/"])
def test_an_archive_is_the_same_adapter_as_its_two_files(
    site: Site, kind: str, prefix: str
) -> None:
    whole = site.upload().json()["digest"]
    members = {prefix + name: content for name, content in (GOOD | MORE).items()}
    archive = packed_as(kind, members | {prefix + "a/b/adapter_config.json": b"{}"})
    answer = site.upload(config=None, weights=None, archive=("a", archive))
    assert answer.status_code == 200, answer.text
    assert answer.json()["digest"] == whole
    assert len(site.stored()) == 3


TOOLS = {
    "zip": "zip -q -r - adapter",
    "zip_flat": "cd adapter && zip -q -r - .",
    "zip_stored": "zip -q -0 -r - adapter",
    "tar": "tar -c adapter",
    "tar_flat": "tar -C adapter -c .",
    "tar_pax": "tar --format=pax -c adapter",
    "tar_v7": "tar --format=v7 -c adapter",
    "tar_gz": "tar -cz adapter",
    "gzip": "tar -c adapter | gzip -9",
    "zstd": "tar -c adapter | zstd -q -19",
    "zstd_with_checksum": "tar -c adapter | zstd -q --check",
    "python_zip": "python3 -m zipfile -c a.zip adapter/ && cat a.zip",
    "python_tar": "python3 -m tarfile -c a.tgz adapter/ && cat a.tgz",
}


@pytest.mark.parametrize("tool", TOOLS)
def test_what_real_tools_pack_is_read(site: Site, tmp_path: Path, tool: str) -> None:
    whole = site.upload().json()["digest"]
    write_folder(tmp_path / "adapter")
    (tmp_path / "adapter" / "README.md").write_text("hello")
    archive = subprocess.run(
        ["sh", "-c", TOOLS[tool]], cwd=tmp_path, check=True, capture_output=True
    ).stdout
    answer = site.upload(config=None, weights=None, archive=("a", archive))
    assert answer.status_code == 200, answer.text
    assert answer.json()["digest"] == whole


def with_member(name: str, content: bytes = b"x") -> list[tuple[str, bytes]]:
    return [(name, content), *pairs(GOOD)]


def with_tar_member(**fields: object) -> bytes:
    members = [(named(name), content) for name, content in GOOD.items()]
    return tar_of([(named(str(fields.pop("name", "x")), **fields), b""), *members])


def with_zip_member(change: Callable[[zipfile.ZipInfo], object]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        member = zipfile.ZipInfo("x")
        change(member)
        archive.writestr(member, b"target")
        for name, content in GOOD.items():
            archive.writestr(name, content)
    return file.getvalue()


def mode(kind: int) -> Callable[[zipfile.ZipInfo], object]:
    return lambda member: setattr(member, "external_attr", (kind | 0o644) << 16)


def encrypted() -> bytes:
    made = bytearray(zipped(GOOD))
    for magic, offset in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        made[made.index(magic) + offset] |= 1
    return bytes(made)


def with_crc(change: int) -> bytes:
    made = bytearray(zipped(GOOD, zipfile.ZIP_STORED))
    made[made.index(GOOD[WEIGHTS][:64]) + 100 + change] ^= 1
    return bytes(made)


def patched(made: bytes, old: bytes, new: bytes) -> bytes:
    assert old in made
    return made.replace(old, new)


def declared(size: int) -> bytes:
    """A zip whose members are said to have `size` bytes."""
    made = bytearray(zipped(GOOD))
    for magic, offset in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        at = made.rindex(magic) + offset
        made[at : at + 4] = struct.pack("<I", size)
    return bytes(made)


def gnu_header(kind: bytes, size: int) -> bytes:
    member = named("././@LongLink")
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


def pax_of(**records: str) -> bytes:
    member = named("x")
    member.pax_headers = dict(records)
    good = [(named(name), content) for name, content in GOOD.items()]
    return tar_of([(member, b"x"), *good], tarfile.PAX_FORMAT)


def pax_global(**records: str) -> bytes:
    return tarfile.TarInfo.create_pax_global_header(dict(records)) + tarred(GOOD)


def negative_size() -> bytes:
    """A header of a size below zero, in the form of GNU tar for large numbers."""
    header = bytearray(named("x").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 12
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


ZEROS = bytes(UPLOAD_BYTES_MAX + 1)
BOMB = bytes(40 * 2**20)

BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "text": (b"hello", "no archive that is known"),
    "zeros": (bytes(2048), "no archive that is known"),
    "safetensors": (GOOD[WEIGHTS], "no archive that is known"),
    "bzip2": (b"BZh91AY", "bzip2, which is not read"),
    "xz": (b"\xfd7zXZ\0\0", "xz, which is not read"),
    "7z": (b"7z\xbc\xaf\x27\x1c", "7z, which is not read"),
    "rar": (b"Rar!\x1a\x07\0", "RAR, which is not read"),
    "gzip_of_weights": (gzip.compress(GOOD[WEIGHTS]), "gzip of something that is not a tar"),
    "gzip_of_gzip": (gzip.compress(gzip.compress(tarred(GOOD))), "not a tar"),
    "zstd_of_zip": (zstd.compress(zipped(GOOD)), "zstd of something that is not a tar"),
    "without_config": (zipped({WEIGHTS: GOOD[WEIGHTS]}), "adapter_config.json is missing"),
    "without_weights": (tarred({CONFIG: GOOD[CONFIG]}), "adapter_model.safetensors is missing"),
    "no_members": (zipped({}), "adapter_config.json is missing"),
    "too_deep": (zipped(files("a/b/")), "adapter_config.json is missing"),
    "two_folders": (zipped(files("a/") | files("b/")), "several folders"),
    "pickle": (zipped(with_member("adapter_model.bin")), "is a pickle"),
    "pickle_in_capitals": (tarred(with_member("A.PT")), "is a pickle"),
    "duplicate_zip": (zipped([*pairs(GOOD), (CONFIG, b"{}")]), "twice"),
    "duplicate_tar": (tarred([*pairs(GOOD), (WEIGHTS, b"{}")]), "twice"),
    "duplicate_by_dot": (tarred([*pairs(GOOD), ("./" + WEIGHTS, b"{}")]), "twice"),
    "duplicate_in_capitals": (zipped([*pairs(GOOD), (WEIGHTS.upper(), b"{}")]), "twice"),
    "duplicate_in_fullwidth": (
        zipped([*pairs(GOOD), (CONFIG.replace("a", "ａ"), b"{}")]),
        "twice",
    ),
    "only_looks_like": (zipped({CONFIG.replace("a", "ａ"): b"{}"}), "only looks like"),
    "symlink": (with_tar_member(type=tarfile.SYMTYPE, linkname="/etc/passwd"), "symbolic link"),
    "hard_link": (with_tar_member(type=tarfile.LNKTYPE, linkname=CONFIG), "hard link"),
    "weights_a_link": (
        with_tar_member(name=WEIGHTS, type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        "symbolic link",
    ),
    "device": (with_tar_member(type=tarfile.CHRTYPE), "a device"),
    "block_device": (with_tar_member(type=tarfile.BLKTYPE), "a device"),
    "pipe": (with_tar_member(type=tarfile.FIFOTYPE), "a pipe"),
    "sparse": (with_tar_member(type=tarfile.GNUTYPE_SPARSE), "sparse"),
    "unknown_kind": (with_tar_member(type=b"Q"), "unknown kind"),
    "zip_symlink": (with_zip_member(mode(stat.S_IFLNK)), "symbolic link"),
    "zip_device": (with_zip_member(mode(stat.S_IFCHR)), "a device"),
    "zip_pipe": (with_zip_member(mode(stat.S_IFIFO)), "a pipe"),
    "encrypted": (encrypted(), "encrypted"),
    "zip_bzip2": (zipped(GOOD, zipfile.ZIP_BZIP2), "compression that is not read"),
    "zip_lzma": (zipped(GOOD, zipfile.ZIP_LZMA), "compression that is not read"),
    "wrong_crc": (with_crc(0), "Bad CRC"),
    "gzip_wrong_crc": (gzip.compress(tarred(GOOD))[:-8] + bytes(8), "CRC check failed"),
    "gzip_without_crc": (gzip.compress(tarred(GOOD))[:-8], "cut short"),
    "zstd_wrong_checksum": (
        zstd.compress(tarred(GOOD), options={zstd.CompressionParameter.checksum_flag: 1})[:-1]
        + b"\0",
        "is damaged",
    ),
    "bomb_zip": (zipped({WEIGHTS: BOMB}), "larger than the"),
    "bomb_gzip": (gzip.compress(tarred({"x": BOMB} | GOOD)), "more than 200 times"),
    "bomb_zstd": (zstd.compress(tarred({"x": BOMB} | GOOD)), "more than 200 times"),
    "too_large": (tarred({CONFIG: b"{}", WEIGHTS: ZEROS}), "larger than the"),
    "too_large_config": (zipped({CONFIG: b" " * (2**20 + 1)}), "larger than the 1048576"),
    "declared_smaller": (declared(10), "damaged"),
    "declared_huge": (declared(2**32 - 2), "damaged"),
    "too_many_zip": (
        zipped({f"{place}.txt": b"" for place in range(MEMBERS_MAX + 1)}),
        f"at most {MEMBERS_MAX}",
    ),
    "too_many_tar": (
        tarred({f"{place}.txt": b"" for place in range(MEMBERS_MAX + 1)}),
        f"more than {MEMBERS_MAX} members",
    ),
    "huge_count_zip": (
        zipped({f"{place:0200}": b"" for place in range(6000)}),
        "directory of more than",
    ),
    "folders_without_end": (
        tar_of([(named(f"{n}", type=tarfile.DIRTYPE), b"") for n in range(5 * MEMBERS_MAX)]),
        "headers",
    ),
    "long_name_of_gigabytes": (gnu_header(b"L", 2**33) + bytes(1024), "extended header of"),
    "pax_of_gigabytes": (gnu_header(b"x", 2**33) + bytes(1024), "extended header of"),
    "long_names_without_end": (
        (gnu_header(b"L", 1) + b"a" * 1 + bytes(511)) * 5000 + tarred(GOOD),
        "headers",
    ),
    "pax_nonsense": (gnu_header(b"x", 10) + b"nonsense\n\n" + bytes(502), "extended header is"),
    "pax_length_lies": (gnu_header(b"x", 9) + b"99 a=b\n\n\n" + bytes(503), "extended header is"),
    "pax_traversal": (pax_of(path="../../x"), "outside of its folder"),
    "pax_size_negative": (pax_of(size="-1"), "not a number"),
    "pax_size_huge": (pax_of(size="9" * 19), "cut short"),
    "pax_sparse": (pax_of(**{"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}), "sparse"),
    "pax_global_path": (pax_global(path="x"), "for all its members"),
    "behind_the_end": (tarred(GOOD) + b"more", "behind its end"),
    "second_tar_behind": (tarred(GOOD) + tarred(GOOD), "behind its end"),
    "tar_bad_checksum": (
        tarred(GOOD)[:1024] + patched(tarred(GOOD)[1024:], b"ustar", b"usta1"),
        "header of the tar",
    ),
    "tar_negative_size": (negative_size() + bytes(1024), "below zero"),
}

NAMES = {
    "parent": "../x",
    "parent_inside": "top/../../x",
    "parent_of_config": f"../{CONFIG}",
    "absolute": "/etc/passwd",
    "absolute_config": f"/{CONFIG}",
    "two_slashes": "//x",
    "backslashes": "..\\x",
    "drive": "C:x",
    "drive_and_slash": "c:/x",
    "fullwidth_parent": "．．/x",
    "fullwidth_slash": "a／../x",
    "one_letter_two_dots": "‥/x",
    "fullwidth_backslash": "a＼x",
    "right_to_left": "gpj\u202eexe",
    "nothing_wide": "adapter_config\u200b.json",
    "soft_hyphen": "adapter\xad_config.json",
    "byte_order": "\ufeffx",
    "newline": "a\nb",
    "escape": "a\x1b[31mb",
    "line_end": "a\u2028b",
    "endless": "x" * 1100,
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_archive_is_refused_by_what_is_wrong(site: Site, fault: str) -> None:
    archive, words = BROKEN[fault]
    answer = site.upload(config=None, weights=None, archive=("a.zip", archive))
    error = error_of(answer, 413 if "larger than" in words else 422)
    assert words in error["message"]
    assert site.stored() == []
    assert site.names() == []
    assert site.engine.submits == []


@pytest.mark.parametrize("kind", ["zip", "tar", "pax", "gz", "zst"])
@pytest.mark.parametrize("fault", NAMES)
def test_s3_a_members_name_that_leads_elsewhere_is_refused(
    tmp_path: Path, fault: str, kind: str
) -> None:
    members = with_member(NAMES[fault])
    (tmp_path / "archive").write_bytes(packed_as(kind, members))
    (tmp_path / "draft").mkdir()
    with pytest.raises(InvalidAdapter, match=r"name|folder"):
        unpack(tmp_path / "archive", tmp_path / "draft", UPLOAD_BYTES_MAX)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "draft"]
    assert list((tmp_path / "draft").iterdir()) == []


def test_a_zero_byte_does_not_hide_the_rest_of_a_name(site: Site) -> None:
    archive = patched(zipped(with_member("adapter_x.json_y")), b"x.json_y", b"x.jso\0\0y")
    error = error_of(site.upload(config=None, weights=None, archive=("a", archive)), 422)
    assert "nobody sees" in error["message"]


@pytest.mark.parametrize("kind", ["zip", "stored", "tar", "gz", "zst", "pax"])
@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_archive_never_breaks_the_server(tmp_path: Path, kind: str, seed: int) -> None:
    """Bytes changed, cut out, put in or doubled: what passes is the adapter itself."""
    chance = random.Random(f"{kind} {seed}")
    archive = damaged(packed_as(kind, GOOD | {"README.md": b"hello" * 100}), chance)
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "archive").write_bytes(archive)
    refusal: ApiError | None = None
    try:
        check_draft(draft, INFO, UPLOAD_BYTES_MAX)
    except ApiError as error:
        refusal = error
    if refusal is not None:
        assert refusal.status in (413, 422)
        assert refusal.message
    else:
        kept = sorted(path.name for path in draft.iterdir())
        assert kept == sorted(GOOD)
        if kind not in ("tar", "pax"):  # a plain tar has no checksum of its contents
            assert (draft / WEIGHTS).read_bytes() == GOOD[WEIGHTS]


def damaged(archive: bytes, chance: random.Random) -> bytes:
    made = bytearray(archive)
    # most of an archive is tensors; what matters lies at the ends and around the headers
    spots = [chance.randrange(len(made)), chance.randrange(min(1024, len(made)))]
    spots.append(len(made) - 1 - chance.randrange(min(400, len(made))))
    at = chance.choice(spots)
    match chance.randrange(5):
        case 0:
            made[at] ^= 1 << chance.randrange(8)
        case 1:
            del made[at:]
        case 2:
            del made[at : at + chance.randrange(1, 600)]
        case 3:
            made[at:at] = chance.randbytes(chance.randrange(1, 600))
        case _:
            made[at : at + 4] = chance.choice((b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff"))
    return bytes(made)


@pytest.mark.parametrize("kind", ["zip", "tar", "gz", "zst"])
def test_s8_memory_does_not_grow_with_the_archive(tmp_path: Path, kind: str) -> None:
    """Of what Python allocates; the peak is a few chunks."""
    chance = random.Random(0)
    members = {CONFIG: b"{}", WEIGHTS: chance.randbytes(48 * 2**20)}
    (tmp_path / "archive").write_bytes(packed_as(kind, members))
    (tmp_path / "draft").mkdir()
    tracemalloc.start()
    try:
        unpack(tmp_path / "archive", tmp_path / "draft", 64 * 2**20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / "draft" / WEIGHTS).stat().st_size == 48 * 2**20
    assert peak < 12 * 2**20


def test_s8_what_is_passed_over_is_counted_too(tmp_path: Path) -> None:
    chance = random.Random(0)
    (tmp_path / "archive").write_bytes(tarred({"other": chance.randbytes(66 * 2**20)} | GOOD))
    (tmp_path / "draft").mkdir()
    with pytest.raises(TooLarge, match="are unpacked"):
        unpack(tmp_path / "archive", tmp_path / "draft", 2**20)


def test_an_archive_comes_alone(site: Site) -> None:
    error = error_of(site.upload(archive=("a", zipped(GOOD))), 400)
    assert "beside an archive" in error["message"]
    assert site.stored() == []
