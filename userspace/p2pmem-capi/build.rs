// SPDX-License-Identifier: MIT OR Apache-2.0

//! Gives the library its soname, by which programs find it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The ABI's version, which is the crate's major one.
    println!(
        "cargo:rustc-cdylib-link-arg=-Wl,-soname,libp2pmem.so.{}",
        std::env::var("CARGO_PKG_VERSION_MAJOR").expect("cargo sets it")
    );
}
