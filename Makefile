# SPDX-License-Identifier: MIT OR Apache-2.0
# Everything there is to do with p2pmem, each from nothing: `make help` lists it.
#
# Without KDIR and KREL all is built and run in the sandbox, a cached Debian root that these targets make when it is
# missing. With KDIR or KREL the module is built on and for this machine. Kbuild has the module's own build rules.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory

VERSION := 0.1.0
sandbox := tools/sandbox/sandbox
in := $(sandbox) run
reports := build/reports

# Whoever shares a machine can keep several checkouts' builds apart with P2PMEM_TARGET.
target := $(or $(P2PMEM_TARGET),main)
# What the programs of the test bed find the module and user space by; both paths are the sandbox's.
export P2PMEM_MODULE := /src/build/p2pmem.ko
export P2PMEM_BIN := /build/target/$(target)/debug
# tools/check-tree looks for it: a checkout's own path has no business in the tree.
export P2PMEM_CHECKOUT := $(CURDIR)
export JOBS V KEEP_WORK

# Cargo in the sandbox, with the versions that the lock files name.
cargo := $(in) cargo --locked

# Cargo's tests, whose property tests make their values from the same seed in each run: nothing may fail by luck.
cargo-test := $(in) env PROPTEST_RNG_SEED=20 cargo --locked test

# maturin builds the extension module of the Python package, and pytest tests it.
all-but-python := --workspace --exclude p2pmem-python

ifneq ($(origin KDIR),undefined)
module-for := kdir $(KDIR)
else ifneq ($(origin KREL),undefined)
module-for := krel $(KREL)
endif

help: ## this list
	@awk -F ':.*## ' '/^[a-z][a-z_-]*:.*## / { \
		kind = substr($$2, 1, 2); text = $$2; sub(/^[+-] /, "", text); \
		line = sprintf("  %-16s %s\n", $$1, text); \
		if (kind == "+ ") main = main line; else if (kind == "- ") use = use line; else part = part line } \
		END { printf "The main job and its proof:\n%sParts:\n%sOn a machine that is to use p2pmem:\n%s", main, part, use }' \
		$(firstword $(MAKEFILE_LIST))
	@echo 'Variables:'
	@echo '  KDIR=<folder>         build the module here, against this kernel build folder (with Rust metadata)'
	@echo '  KREL=<release>        build the module here, for this installed kernel; on Debian the metadata is made'
	@echo '  PEER_SYMVERS=<file>   Module.symvers of an RDMA core with the peer-memory interface, or none'
	@echo '  OUT=<folder>          where rust-metadata puts what it makes for KREL'
	@echo '  JOBS=<n> V=1          number of jobs; whole commands of the module build'
	@echo '  P2PMEM_CACHE=<folder> where caches live          (default: $${XDG_CACHE_HOME:-~/.cache}/p2pmem)'
	@echo '  P2PMEM_MIRROR=<url>   Debian mirror              (default: the one that apt uses)'
	@echo '  TESTS=<part of a name> tests in guests to run    (default: all)'
	@echo '  P2PMEM_KERNEL=<7.x>   another stock kernel       (default: the one in tools/sandbox/make-root)'

# --- the main job and its proof ---------------------------------------------------------------------------------------

demo: modules demo-programs ## + peer-to-peer work on a stock kernel, from nothing: build, boot, transform, verify
	@mkdir -p $(reports)
	@$(in) $(P2PMEM_BIN)/p2pmem-demo --module $(P2PMEM_MODULE) --report $(reports)/demo.json

test: ## + everything there is: lint, host tests, module, VM tests, demo; ends with "N passed, N failed"
	@tools/run-tests

# --- parts ------------------------------------------------------------------------------------------------------------

sandbox: ## make the sandbox where it is missing
	@tools/probe sandbox
	@$(sandbox) make

ifdef module-for
modules: ## build p2pmem.ko into build/ (for the sandbox's stock kernel, or with KDIR or KREL)
	@tools/make-modules $(module-for)
else
modules: sandbox
	@$(in) tools/make-modules sandbox
endif

modules-next: sandbox ## build p2pmem.ko and the tests' modules for the next kernel series too, into build/next/, checked by clippy
	@$(in) tools/make-modules next

debug-kernel: sandbox ## build the debug kernel, with KASAN, lockdep, kmemleak, KUnit, and peer memory in its RDMA stack
	@$(in) tools/debug-kernel make >/dev/null

debug-modules: debug-kernel ## build p2pmem.ko and the tests' modules for the debug kernel into build/debug/
	@$(in) tools/make-modules debug

# What the demo runs, and no more of user space: its first build is the first thing that anybody sees of p2pmem.
demo-programs: testbed
	@$(cargo) build --manifest-path userspace/Cargo.toml --no-default-features -p p2pmemctl -p p2pmem-perf -p p2pmem-preload

user: sandbox ## build the user-space workspace: library, C library, Python package, preload shim, p2pmemctl, exporter, examples
	@$(cargo) build --manifest-path userspace/Cargo.toml $(all-but-python) --all-features --lib --bins --examples
	@$(in) userspace/p2pmem-python/wheel

wheel: sandbox ## build the Python package's wheel, optimized, into build/python-release/
	@$(in) userspace/p2pmem-python/wheel --release

testbed: sandbox ## build the test bed: device models, VM runner, guest programs, demo
	@$(cargo) build --manifest-path tests/Cargo.toml --workspace

lint: sandbox ## formats, clippy, shellcheck, prose, layers, where unsafe stands, the tree, dependencies (CHECKS="unsafe tree ..." for some)
	@$(in) tools/lint $(CHECKS)

format: sandbox ## format all Rust sources
	@$(in) bash -c "git ls-files -co --exclude-standard -z 'rust/*.rs' | xargs -0 rustfmt --edition 2021"
	@$(in) cargo fmt --manifest-path userspace/Cargo.toml --all
	@$(in) cargo fmt --manifest-path tests/Cargo.toml --all

ifdef module-for
rust-analyzer: modules ## set rust-analyzer up for module, user space and tests together, and check that it understands them
	@tools/rust-analyzer host
else
rust-analyzer: modules
	@tools/rust-analyzer sandbox
endif

test-user: sandbox ## tests that need no guest: of user space and of the test bed's own parts
	@$(cargo-test) --manifest-path userspace/Cargo.toml $(all-but-python) --all-features --no-fail-fast
	@$(cargo-test) --manifest-path tests/Cargo.toml --no-fail-fast
	@$(in) userspace/p2pmem-python/test

test-vm: modules debug-modules user testbed ## tests in guests, with the stock kernel and with the debug kernel (TESTS=<part of a name> for some)
	@P2PMEM_DEBUG_KERNEL=make $(in) tools/vm-tests $(TESTS)

test-vm-stock: modules user testbed ## those with the stock kernel alone
	@$(in) tools/vm-tests $(TESTS)

test-vm-debug: modules debug-modules user testbed ## those with the debug kernel alone
	@P2PMEM_DEBUG_KERNEL=make $(in) tools/vm-tests $(or $(TESTS),debug::)

# Ten times as many cases of property tests: of those that say how many they try, and of the others, whose number is 256.
more-cases := P2PMEM_TIMES=10 PROPTEST_CASES=2560

# Twenty-five times as many rounds: fifty of what goes through two in a short run. All tests run, so that the reports are whole.
test-long: modules debug-modules user testbed ## races and storms with 25 times the rounds on both kernels, property tests from new seeds with 10 times the cases
	@$(in) env $(more-cases) cargo --locked test --manifest-path userspace/Cargo.toml $(all-but-python) --all-features --no-fail-fast
	@$(in) env $(more-cases) cargo --locked test --manifest-path tests/Cargo.toml --no-fail-fast
	@P2PMEM_TIMES=25 P2PMEM_DEBUG_KERNEL=make $(in) tools/vm-tests

kunit: debug-modules testbed ## the module's KUnit cases, in a guest with the debug kernel
	@$(in) tools/kunit

bench: modules user testbed ## what buffers, decisions and registering memory with a NIC cost, in instructions; fails where an aim is missed
	@$(in) tools/make-modules peer
	@$(in) tools/bench

bench-short: modules testbed ## the rows of bench without registrations and live buffers
	@$(in) tools/bench --short

# --- on a machine that is to use p2pmem -------------------------------------------------------------------------------

ifdef KREL
rust-metadata: ## - make the Rust metadata Debian's headers lack: for KREL=<release> in OUT=<folder>
	@tools/rust-metadata $(if $(OUT),$(KREL) $(OUT),cached $(KREL) $${P2PMEM_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/p2pmem}/build)
else
rust-metadata: sandbox
	@$(in) bash -c 'tools/rust-metadata cached "$$(cat /etc/p2pmem-kernel)" /build'
endif

modules_install: ## - install the module that `make modules KDIR=...` or KREL=... built, below INSTALL_MOD_PATH
	@[ -e build/kmod/p2pmem.ko ] || { echo 'modules_install: build it first: make modules KREL=$$(uname -r)' >&2; exit 1; }
	@env -u MAKEFLAGS -u MFLAGS $(MAKE) -C "$$(cat build/kdir)" M=$(CURDIR) MO=$(CURDIR)/build/kmod \
		INSTALL_MOD_PATH="$(INSTALL_MOD_PATH)" modules_install

install: modules_install ## - modules_install, and p2pmemctl, exporter, libraries, headers, the unit and udev rule, below DESTDIR and PREFIX
	@command -v cargo >/dev/null || { echo 'install: cargo is missing (Debian: apt-get install cargo)' >&2; exit 1; }
	@command -v cmake >/dev/null || { echo 'install: cmake is missing (Debian: apt-get install cmake libclang-dev)' >&2; exit 1; }
	@cargo build --locked --release --manifest-path userspace/Cargo.toml -p p2pmemctl -p p2pmem-exporter -p p2pmem-capi \
		-p p2pmem-preload \
		--target-dir build/target
	@install -D -m 755 -t "$(DESTDIR)$(PREFIX)/bin" build/target/release/p2pmemctl build/target/release/p2pmem-exporter
	@install -D -m 644 -t "$(DESTDIR)$(PREFIX)/include/linux" include/uapi/linux/p2pmem.h
	@DESTDIR="$(DESTDIR)" userspace/p2pmem-capi/install build/target/release "$(PREFIX)"
	@DESTDIR="$(DESTDIR)" tools/systemd/install "$(PREFIX)"

dkms: ## - put the sources where DKMS takes them from, and have it build and install the module
	@tools/dkms $(VERSION) "$(DESTDIR)"

# --- cleaning ---------------------------------------------------------------------------------------------------------

clean: ## remove build/: reports and the module
	@rm -rf build

distclean: clean ## remove what the cache holds of this project too: sandboxes, metadata, targets
	@$(sandbox) distclean

PREFIX ?= /usr/local

.PHONY: help demo demo-programs test sandbox modules modules-next debug-kernel debug-modules user wheel testbed lint format rust-analyzer kunit bench bench-short test-user \
	test-vm test-vm-stock test-vm-debug test-long rust-metadata modules_install install dkms clean distclean
