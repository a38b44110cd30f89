# syntax=docker/dockerfile:1
#
#   docker build -t flce-tune .
#   docker run --gpus all -p 8000:8000 -v flce-tune:/data -e FLCE_TUNE_TOKEN=... flce-tune
#
# Without a token the service refuses to listen for others; --insecure overrides that.

ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS wheel
WORKDIR /source
COPY . .
# The tools that build it are pinned like the rest.
RUN PIP_CONSTRAINT=constraints.txt pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .


FROM python:${PYTHON}-slim-bookworm

# gcc: Triton compiles its launchers when a kernel first runs. tini reaps what a killed sweep leaves.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev tini \
    && rm -rf /var/lib/apt/lists/*

# A layer of its own, because it is several gigabytes and changes rarely.
ARG TORCH=2.13.0
RUN pip install --no-cache-dir "torch==${TORCH}"

RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    pip install --no-cache-dir --constraint /constraints.txt \
        "$(echo /wheel/flce_tune-*.whl)[service,client,postgres]" \
        "torch==${TORCH}"

RUN useradd --create-home --uid 10001 flce \
    && install --directory --owner flce --group flce /data
USER 10001
WORKDIR /data
VOLUME /data

ENV FLCE_TUNE_DB=/data/tuning.sqlite3 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1

EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]

ENTRYPOINT ["tini", "--"]
CMD ["flce-tune", "serve", "--host", "0.0.0.0", "--port", "8000"]
