// SPDX-License-Identifier: MIT OR Apache-2.0

//! Generates the layouts of the mlx5 interface from the kernel's headers.
//!
//! `P2PMEM_MLX5_HEADERS` names the folder with mlx5_ifc.h. If the variable is not set, the build uses the headers of
//! the newest kernel under /usr/src, or its source archive.

#[path = "build/header.rs"]
mod header;

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use header::{Headers, Layout, Member};

const VARIABLE: &str = "P2PMEM_MLX5_HEADERS";
const SOURCES: &str = "/usr/src";
/// The header that identifies the folder.
const MAIN: &str = "mlx5_ifc.h";
/// The headers to read. Each depends on those before it.
const HEADERS: [&str; 8] = [
    "mlx5_ifc_fpga.h",
    "mlx5_ifc.h",
    "device.h",
    "doorbell.h",
    "qp.h",
    "cq.h",
    "port.h",
    "driver.h",
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Not the folder, whose time is that of the checkout.
    println!("cargo::rerun-if-changed=build/header.rs");
    println!("cargo::rerun-if-env-changed={VARIABLE}");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let folder = find(&out).unwrap_or_else(|error| stop(&error));
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut headers = Headers::default();
    for name in HEADERS {
        let path = folder.join(name);
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| stop(&format!("cannot read {}: {error}", path.display())));
        headers
            .read(&text)
            .unwrap_or_else(|error| stop(&format!("{}: {error}", path.display())));
    }
    let target = out.join("mlx5_layout.rs");
    std::fs::write(&target, generate(&headers))
        .unwrap_or_else(|error| stop(&format!("cannot write {}: {error}", target.display())));
}

/// Prints an error and ends the build.
fn stop(error: &str) -> ! {
    eprintln!("error: mlx5 headers: {error}");
    std::process::exit(1);
}

/// Returns the folder with the headers.
fn find(out: &Path) -> Result<PathBuf, String> {
    if let Some(folder) = std::env::var_os(VARIABLE).filter(|folder| !folder.is_empty()) {
        let folder = PathBuf::from(folder);
        return if folder.join(MAIN).is_file() {
            Ok(folder)
        } else {
            Err(format!(
                "{VARIABLE} is {}, but there is no {} in it",
                folder.display(),
                MAIN
            ))
        };
    }
    let entries: Vec<String> = std::fs::read_dir(SOURCES)
        .map_err(|error| format!("cannot list {SOURCES}: {error}; set {VARIABLE} to a kernel's include/linux/mlx5"))?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    let headers = entries
        .iter()
        .filter(|name| name.starts_with("linux-headers-") || name.starts_with("linux-"))
        .map(|name| (version(name), Path::new(SOURCES).join(name).join("include/linux/mlx5")))
        .filter(|(_, folder)| folder.join(MAIN).is_file())
        .max();
    if let Some((_, folder)) = headers {
        return Ok(folder);
    }
    let archive = entries
        .iter()
        .filter(|name| name.starts_with("linux-source-") && name.contains(".tar"))
        .max_by_key(|name| version(name));
    match archive {
        Some(archive) => unpack(&Path::new(SOURCES).join(archive), out),
        None => Err(format!(
            "no kernel headers and no linux-source archive in {SOURCES}: install linux-headers of your kernel, or set \
             {VARIABLE} to a kernel's include/linux/mlx5"
        )),
    }
}

/// Returns the numbers in a name, to compare versions.
fn version(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit())
        .filter_map(|part| part.parse().ok())
        .collect()
}

/// Extracts the headers from a source archive.
fn unpack(archive: &Path, out: &Path) -> Result<PathBuf, String> {
    let folder = out.join("headers");
    std::fs::create_dir_all(&folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
    let status = Command::new("tar")
        .arg("-xf")
        .arg(archive)
        .arg("-C")
        .arg(&folder)
        .args(["--wildcards", "--strip-components=4", "*/include/linux/mlx5/*.h"])
        .status()
        .map_err(|error| format!("cannot run tar: {error}"))?;
    if !status.success() || !folder.join(MAIN).is_file() {
        return Err(format!("cannot unpack the headers from {}", archive.display()));
    }
    Ok(folder)
}

fn generate(headers: &Headers) -> String {
    let mut text = String::new();
    text.push_str("/// Enumerators and numbers, by the name they have in the headers.\npub mod constants {\n");
    for (name, value) in &headers.constants {
        // Skip include guards and similar macros.
        if name.starts_with(char::is_uppercase) {
            let kind = if u32::try_from(*value).is_ok() { "u32" } else { "u64" };
            let name = name.to_uppercase();
            let _ = writeln!(text, "pub const {name}: {kind} = {value:#x};");
        }
    }
    text.push_str("}\n/// Opcodes of commands.\npub mod op {\n");
    for (name, value) in &headers.constants {
        let opcode = name
            .strip_prefix("MLX5_CMD_OPCODE_")
            .or_else(|| name.strip_prefix("MLX5_CMD_OP_"))
            .filter(|_| (0x100..0x1000).contains(value));
        if let Some(opcode) = opcode.filter(|opcode| !["MAX", "GENERAL_START", "GENERAL_END"].contains(opcode)) {
            let digit = if opcode.starts_with(|c: char| c.is_ascii_digit()) {
                "_"
            } else {
                ""
            };
            let _ = writeln!(text, "pub const {digit}{opcode}: u16 = {value:#x};");
        }
    }
    text.push_str("/// The name of an opcode, if the headers have one.\npub fn name(opcode: u16) -> Option<&'static str> {\nSome(match opcode {\n");
    let mut seen = BTreeSet::new();
    for (name, value) in &headers.constants {
        let opcode = name
            .strip_prefix("MLX5_CMD_OPCODE_")
            .or_else(|| name.strip_prefix("MLX5_CMD_OP_"));
        if let Some(opcode) = opcode {
            let named = (0x100..0x1000).contains(value) && !["MAX", "GENERAL_START", "GENERAL_END"].contains(&opcode);
            if named && seen.insert(*value) {
                let _ = writeln!(text, "{value:#x} => \"{opcode}\",");
            }
        }
    }
    text.push_str("_ => return None,\n})\n}\n}\n");
    text.push_str("/// Structures of mlx5_ifc.h.\npub mod ifc {\n");
    for (name, layout) in &headers.types {
        if let Some(name) = name.strip_prefix("mlx5_ifc_") {
            structure(&mut text, name.strip_suffix("_bits").unwrap_or(name), layout);
        }
    }
    text.push_str("}\n/// Structures of the other headers.\npub mod wire {\n");
    for (name, layout) in &headers.types {
        if !name.starts_with("mlx5_ifc_") {
            structure(&mut text, name.strip_prefix("mlx5_").unwrap_or(name), layout);
        }
    }
    text.push_str("}\n");
    text
}

fn structure(text: &mut String, name: &str, layout: &Layout) {
    let _ = writeln!(text, "/// `{name}`.\npub mod {name} {{");
    let _ = writeln!(text, "pub const BYTES: usize = {};", layout.bits / 8);
    let mut seen = BTreeSet::new();
    for member in &layout.members {
        let Member {
            name,
            offset,
            width,
            count,
            aggregate,
        } = member;
        let reserved = name.starts_with("reserved") || name.starts_with("rsvd");
        // Members of different unnamed unions may have the same name; use the first one.
        if name.is_empty() || reserved || !seen.insert(name.clone()) {
            continue;
        }
        let name = name.to_uppercase();
        let _ = match (count, aggregate) {
            (Some(count), _) => writeln!(
                text,
                "pub const {name}: super::super::Array = super::super::Array::new({offset}, {width}, {count});"
            ),
            (None, true) => writeln!(
                text,
                "pub const {name}: super::super::Part = super::super::Part::new({offset}, {width});"
            ),
            (None, false) => writeln!(
                text,
                "pub const {name}: super::super::Field = super::super::Field::new({offset}, {width});"
            ),
        };
    }
    text.push_str("}\n");
}
