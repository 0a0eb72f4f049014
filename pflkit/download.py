"""Files fetched through a scratch folder: each is there whole or not at all, and a failure says what to do."""

import os
import tarfile
import tempfile
import zipfile
import zlib
from http.client import HTTPException
from pathlib import Path

FAILED = (OSError, RuntimeError, EOFError, HTTPException, zlib.error, tarfile.TarError, zipfile.BadZipFile)


def fetch(folder, attempts, download, lacking, advice):
    """Has the first of `attempts` that can fetch what is missing into `folder`.

    attempts: (what is printed, a function of a scratch folder in `folder`). FileNotFoundError, "`lacking` (why);
    `advice`", where none succeeds and where download=False.
    """
    why = "download=False"
    for what, get in attempts if download else ():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            print(f"downloading {what} into {folder}", flush=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix="download-") as scratch:
                get(Path(scratch))
            return
        except FAILED as error:
            why = " ".join(f"download failed, {error}".split())
    raise FileNotFoundError(f"{lacking} ({why}); {advice}")


def from_mirror(mirror, md5, names, folder):
    """The function for `fetch` that has files `names` from `mirror`, an address with a slash at its end."""

    def get(scratch):
        from torchvision.datasets.utils import download_url

        for name in names:
            download_url(mirror + name, scratch, name, md5[name])
            os.replace(scratch / name, folder / name)

    return get
