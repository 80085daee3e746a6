#!/bin/sh
# Build both images with buildah. BASE names another base image with Python >= 3.11 and venv; PIP_CONF a file with pip's
# settings. Called by `make images`, after `make wheel`.
set -eu
for kind in server node; do
  set -- --file "containers/Containerfile.$kind" --tag "localhost/fedalloy-$kind:latest" --layers
  [ -z "${BASE-}" ] || set -- "$@" --build-arg "BASE=$BASE"
  [ -z "${PIP_CONF-}" ] || set -- "$@" --secret "id=pip,src=$PIP_CONF"
  [ -z "${BUILDAH_OPTIONS-}" ] || set -- "$@" $BUILDAH_OPTIONS
  buildah build "$@" .
done
