// SPDX-License-Identifier: MIT OR Apache-2.0

//! Fetches the chart library of the pages with npm, by the names, versions, and checksums of
//! `web/package-lock.json`. The program contains its files.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The files that the program contains: the path below `node_modules`, and the name in the output folder.
const FILES: [(&str, &str); 3] = [
    ("uplot/dist/uPlot.iife.min.js", "uplot.js"),
    ("uplot/dist/uPlot.min.css", "uplot.css"),
    ("uplot/LICENSE", "uplot.license"),
];
const WITHOUT: &str = "or build without the pages in the browser: cargo build --no-default-features";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for name in ["package.json", "package-lock.json"] {
        println!("cargo::rerun-if-changed=web/{name}");
    }
    if env::var_os("CARGO_FEATURE_SERVER").is_none() {
        return;
    }
    if let Err(message) = fetch() {
        println!("cargo::error={message}");
    }
}

/// Installs the packages in the output folder, and copies the files.
fn fetch() -> Result<(), String> {
    let variable = |name: &str| {
        env::var_os(name)
            .map(PathBuf::from)
            .ok_or(format!("cargo did not set {name}"))
    };
    let (source, out) = (variable("CARGO_MANIFEST_DIR")?.join("web"), variable("OUT_DIR")?);
    let packages = out.join("packages");
    let failed = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    fs::create_dir_all(&packages).map_err(|error| failed(&packages, error))?;
    for name in ["package.json", "package-lock.json"] {
        let to = packages.join(name);
        fs::copy(source.join(name), &to).map_err(|error| failed(&to, error))?;
    }
    let npm = Command::new("npm")
        .args([
            "ci",
            "--omit=dev",
            "--ignore-scripts",
            "--prefer-offline",
            "--no-audit",
            "--no-fund",
        ])
        .current_dir(&packages)
        .output();
    let npm =
        npm.map_err(|error| format!("cannot run npm: {error}; install npm (Debian: apt-get install npm), {WITHOUT}"))?;
    if !npm.status.success() {
        let reason = String::from_utf8_lossy(&npm.stderr).trim().replace('\n', " | ");
        return Err(format!(
            "npm could not fetch the chart library: {reason}; check the network, {WITHOUT}"
        ));
    }
    for (from, to) in FILES {
        let from = packages.join("node_modules").join(from);
        fs::copy(&from, out.join(to)).map_err(|error| failed(&from, error))?;
    }
    Ok(())
}
