#!/bin/sh
# Puts a browser in place for the browser tests: Debian's chromium and its driver, where they are absent and may be
# installed. Says what to do otherwise and never fails: without a browser those tests skip and say so.
set -u
have() { command -v "$1" >/dev/null 2>&1; }
ready() { { have chromium || have google-chrome || have chromium-browser; } && have chromedriver; }

ready && exit 0
if have apt-get; then
  as_root=""
  [ "$(id -u)" = 0 ] || { have sudo && as_root="sudo -n"; }
  if [ "$(id -u)" = 0 ] || [ -n "$as_root" ]; then
    echo "Installing chromium for the browser tests ..."
    DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null 2>&1 ||
      { $as_root apt-get update -qq >/dev/null 2>&1 &&
        DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null 2>&1; }
  fi
fi
ready || echo "No browser: the browser tests will skip. Install Chromium and chromedriver to run them." >&2
exit 0
