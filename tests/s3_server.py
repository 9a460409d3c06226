"""An S3 server on a port of loopback, that is moto's: `python s3_server.py PORT BUCKET`.

An S3 client names its bucket in the host, as in BUCKET.s3.amazonaws.com. No such name leads to
loopback, so the request is given it on its way.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import run_simple


def main(port: int, bucket: str) -> None:
    s3_backends["123456789012"]["aws"].create_bucket(bucket, "us-east-1")
    moto = DomainDispatcherApplication(create_backend_app)

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if not environ["PATH_INFO"].startswith("/moto-api"):
            environ["HTTP_HOST"] = f"{bucket}.s3.amazonaws.com"
        return moto(environ, start)

    run_simple("127.0.0.1", port, app, threaded=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
