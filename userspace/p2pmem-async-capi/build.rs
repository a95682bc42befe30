// SPDX-License-Identifier: MIT OR Apache-2.0

//! Sets the library's soname, by which programs find the library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The soname has the ABI's version, which is the crate's major version.
    println!(
        "cargo:rustc-cdylib-link-arg=-Wl,-soname,libp2pmem-async.so.{}",
        std::env::var("CARGO_PKG_VERSION_MAJOR").expect("cargo sets it")
    );
}
