// SPDX-License-Identifier: MIT OR Apache-2.0

//! Compares the ABI in Rust and C: a C program that includes the header prints size and alignment of every structure,
//! offset and size of every field, every constant and every ioctl number. The tests fail if Rust has another value.
//!
//! The names to compare are read from the header, so that a name without a counterpart in this test fails.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use p2pmem_sys::*;

/// Name in C -> value.
type Numbers = BTreeMap<String, i128>;

macro_rules! layout {
    ($into:ident, $($name:ident { $($field:ident $(as $c_field:literal)?),* $(,)? })*) => {$(
        $into.insert(concat!("sizeof ", stringify!($name)).into(), size_of::<$name>() as i128);
        $into.insert(concat!("alignof ", stringify!($name)).into(), align_of::<$name>() as i128);
        $({
            #[allow(unused_mut, unused_assignments)]
            let mut c_field = stringify!($field);
            $(c_field = $c_field;)?
            fn size<T, F>(_: fn(&T) -> &F) -> usize { size_of::<F>() }
            let key = format!("{}.{}", stringify!($name), c_field);
            $into.insert(format!("offsetof {key}"), std::mem::offset_of!($name, $field) as i128);
            $into.insert(format!("sizeof {key}"), size::<$name, _>(|s| &s.$field) as i128);
        })*
    )*};
}

macro_rules! constants {
    ($into:ident, $($name:ident),* $(,)?) => {$($into.insert(stringify!($name).into(), i128::from($name));)*};
}

fn of_rust() -> Numbers {
    let mut n = Numbers::new();
    layout! { n,
        p2pmem_pci_addr { domain, bus, devfn, reserved }
        p2pmem_info { abi_version, page_size, features, providers, buffers, size, free, generation, version, abi_compatible, reserved }
        p2pmem_provider {
            id, kind, addr, state, bar, numa_node, buffers, bar_offset, size, free, largest, kernel_reserve, pinned,
            scrubbing, vendor, device, class, flags, exports, driver,
        }
        p2pmem_list { providers, count, flags, provider_size, reserved }
        p2pmem_path { provider, client, class, flags, hops, distance, bandwidth, numa_distance, bridge }
        p2pmem_paths { clients, paths, nr_clients, nr_paths, flags, reserved, client_size, path_size }
        p2pmem_request { size, align, clients, nr_clients, flags, strategy, provider, max_class, parts, client_size, reserved, spare }
        p2pmem_alloc { req, handle, provider, size, mmap_offset, bar_offset, class, reserved }
        p2pmem_free { handle, flags }
        p2pmem_buffer {
            handle, provider, size, mmap_offset, bar_offset, bus_addr, state, mappings, exports, attachments, flags,
            handles,
        }
        p2pmem_range { offset, size }
        p2pmem_export { ranges, nr_ranges, handle, flags, fd, range_size, reserved }
        p2pmem_verdict {
            provider, code, addr, worst_client, class, hops, bandwidth, numa_distance, rule_set, size, free, largest,
            rule,
        }
        p2pmem_explain { req, verdicts, text, nr_verdicts, text_len, flags, error, chosen, verdict_size }
        p2pmem_stats {
            provider, flags, allocs, frees, failed, alloc_bytes, free_bytes, maps, scrubbed_bytes, pinned, revoked,
            exports, attaches, attach_failed,
        }
        p2pmem_rule { name, provider, client, flags, action, max_class, reserved, quota }
        p2pmem_rules { rules, count, flags, rule_size, reserved }
        p2pmem_import { fd, flags, handle, provider, size, mmap_offset, bar_offset }
        p2pmem_dma_range { address, size }
        p2pmem_attach { fd, provider, flags, handle, ranges, nr_ranges, range_size, size, info, reserved }
        p2pmem_detach { handle, flags }
        p2pmem_attachment { handle, provider, state, info, ranges, nr_ranges, range_size, size, flags, reserved }
        p2pmem_part { handle, provider, offset, size, mmap_offset, bar_offset, class, reserved }
        p2pmem_stripe { req, parts, nr_parts, flags, size, part_size, reserved }
        p2pmem_event { size, type_ as "type", provider, handle, count, reserved, time_ns }
    }
    constants! { n,
        P2PMEM_ABI_VERSION, P2PMEM_ABI_COMPATIBLE, P2PMEM_MAX_ELEMENT, P2PMEM_MAX_EVENT, P2PMEM_MAX_CLIENTS, P2PMEM_MAX_RANGES, P2PMEM_MAX_DMA_RANGES, P2PMEM_MAX_RULES, P2PMEM_RULE_NAME,
        P2PMEM_MAX_ALIGN, P2PMEM_MAX_PARTS,
        P2PMEM_FEATURE_MMAP_PAGED, P2PMEM_FEATURE_EVENTS, P2PMEM_FEATURE_ADOPT, P2PMEM_FEATURE_DMABUF,
        P2PMEM_FEATURE_PAGELESS, P2PMEM_FEATURE_PEER_MEMORY, P2PMEM_FEATURE_RULES, P2PMEM_FEATURE_IMPORT,
        P2PMEM_FEATURE_STRIPE, P2PMEM_FEATURE_ATTACH,
        P2PMEM_ATTACHMENT_LIVE, P2PMEM_ATTACHMENT_STOPPED, P2PMEM_ATTACHMENT_REVOKED, P2PMEM_ATTACHMENT_GONE,
        P2PMEM_ATTACH_QUIESCED, P2PMEM_ATTACHMENT_TRANSLATED,
        P2PMEM_KIND_OWN, P2PMEM_KIND_ADOPTED, P2PMEM_KIND_REGISTERED,
        P2PMEM_PROVIDER_LIVE, P2PMEM_PROVIDER_REVOKING,
        P2PMEM_PROVIDER_PAGELESS, P2PMEM_PROVIDER_EXPORTABLE, P2PMEM_PROVIDER_PINNED_EXPORTS,
        P2PMEM_PROVIDER_CLEARING,
        P2PMEM_PATH_SAME_DEVICE, P2PMEM_PATH_SAME_SWITCH, P2PMEM_PATH_SWITCHES, P2PMEM_PATH_HOST_BRIDGE,
        P2PMEM_PATH_NUMA_NODE, P2PMEM_PATH_SYSTEM, P2PMEM_PATH_UNREACHABLE,
        P2PMEM_PATH_ACS_REDIRECT, P2PMEM_PATH_BUS_ADDR, P2PMEM_PATHS_RESCAN,
        P2PMEM_STRATEGY_NEAREST, P2PMEM_STRATEGY_UPSTREAM, P2PMEM_STRATEGY_SPREAD, P2PMEM_STRATEGY_PACK,
        P2PMEM_STRATEGY_STRIPE,
        P2PMEM_ALLOC_PREFER,
        P2PMEM_BUFFER_LIVE, P2PMEM_BUFFER_REVOKING, P2PMEM_BUFFER_GONE,
        P2PMEM_EXPORT_PINNED, P2PMEM_EXPORT_MAPPED,
        P2PMEM_VERDICT_CHOSEN, P2PMEM_VERDICT_UNREACHABLE, P2PMEM_VERDICT_TOO_FAR, P2PMEM_VERDICT_TOO_SMALL,
        P2PMEM_VERDICT_FULL, P2PMEM_VERDICT_FRAGMENTED, P2PMEM_VERDICT_REMOVING, P2PMEM_VERDICT_NOT_NAMED,
        P2PMEM_VERDICT_CLASS, P2PMEM_VERDICT_HOPS, P2PMEM_VERDICT_BANDWIDTH, P2PMEM_VERDICT_NUMA,
        P2PMEM_VERDICT_LOAD, P2PMEM_VERDICT_SPACE, P2PMEM_VERDICT_ORDER, P2PMEM_VERDICT_UPSTREAM,
        P2PMEM_VERDICT_DENIED, P2PMEM_VERDICT_QUOTA, P2PMEM_VERDICT_RESERVED, P2PMEM_VERDICT_PREFERENCE,
        P2PMEM_VERDICT_PACKED, P2PMEM_VERDICT_CGROUP, P2PMEM_VERDICT_TOO_FEW, P2PMEM_RULES_NONE, P2PMEM_RULES_ADMIN, P2PMEM_RULES_FILE,
        P2PMEM_RULE_ALLOW, P2PMEM_RULE_DENY, P2PMEM_RULE_PREFER, P2PMEM_RULE_AVOID,
        P2PMEM_RULE_PROVIDER, P2PMEM_RULE_CLIENT, P2PMEM_RULE_QUOTA,
        P2PMEM_EXPLAIN_LAST,
        P2PMEM_EVENT_PROVIDER_ADDED, P2PMEM_EVENT_PROVIDER_REMOVED, P2PMEM_EVENT_BUFFER_REVOKED, P2PMEM_EVENT_LOST,
        P2PMEM_EVENT_ATTACHMENT_REVOKED, P2PMEM_EVENT_ATTACHMENT_STOPPED,
        P2PMEM_IOC_MAGIC, P2PMEM_IOC_INFO, P2PMEM_IOC_LIST, P2PMEM_IOC_PATHS, P2PMEM_IOC_ALLOC, P2PMEM_IOC_FREE,
        P2PMEM_IOC_BUFFER, P2PMEM_IOC_EXPLAIN, P2PMEM_IOC_STATS, P2PMEM_IOC_EXPORT_DMABUF, P2PMEM_IOC_RULES,
        P2PMEM_IOC_IMPORT, P2PMEM_IOC_STRIPE, P2PMEM_IOC_ATTACH_DMABUF, P2PMEM_IOC_DETACH_DMABUF,
        P2PMEM_IOC_ATTACHMENT,
    }
    n
}

fn header() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../include/uapi/linux/p2pmem.h")
}

/// Returns all names that the header defines, in the form that the C program prints. The header has one field,
/// enumerator or macro in a line, so that a line scanner suffices.
fn names_in_header() -> BTreeSet<String> {
    let text = std::fs::read_to_string(header()).expect("the uapi header");
    let mut names = BTreeSet::new();
    let mut in_struct: Option<String> = None;
    let mut in_enum = false;
    let mut in_comment = false;
    for line in text.lines() {
        let line = line.trim();
        if in_comment || line.starts_with("/*") {
            in_comment = !line.contains("*/");
            continue;
        }
        if let Some(rest) = line.strip_prefix("#define P2PMEM_") {
            let end = rest
                .find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
                .unwrap_or(rest.len());
            names.insert(format!("P2PMEM_{}", &rest[..end]));
        } else if let (Some(rest), true) = (line.strip_prefix("struct "), line.ends_with('{')) {
            let name = rest.trim_end_matches('{').trim().to_owned();
            names.insert(format!("sizeof {name}"));
            names.insert(format!("alignof {name}"));
            in_struct = Some(name);
        } else if line.starts_with("enum ") && line.ends_with('{') {
            in_enum = true;
        } else if line == "};" {
            in_struct = None;
            in_enum = false;
        } else if let Some(structure) = &in_struct {
            if let Some(declaration) = line.strip_suffix(';') {
                let declaration = declaration.split('[').next().unwrap_or_default();
                let field = declaration.split_whitespace().last().expect("a field has a name");
                names.insert(format!("offsetof {structure}.{field}"));
                names.insert(format!("sizeof {structure}.{field}"));
            }
        } else if in_enum {
            if let Some((name, _)) = line.split_once('=') {
                names.insert(name.trim().to_owned());
            }
        }
    }
    names
}

/// Compiles and runs a C program that prints `name=number` for each of `names`. Returns `None` if there is no C
/// compiler.
fn of_c(names: &BTreeSet<String>) -> Option<Numbers> {
    let cc = std::env::var("CC").unwrap_or_else(|_| "gcc".into());
    if Command::new(&cc).arg("--version").output().is_err() {
        return None;
    }
    let mut source =
        String::from("#include <stddef.h>\n#include <stdio.h>\n#include \"p2pmem.h\"\nint main(void)\n{\n");
    for name in names {
        let expression = match name.split_once(' ') {
            None => name.clone(),
            Some(("offsetof", member)) => {
                let (structure, field) = member.split_once('.').expect("structure.field");
                format!("offsetof(struct {structure}, {field})")
            }
            Some(("sizeof", what)) => match what.split_once('.') {
                None => format!("sizeof(struct {what})"),
                Some((structure, field)) => format!("sizeof(((struct {structure} *)0)->{field})"),
            },
            Some(("alignof", what)) => format!("_Alignof(struct {what})"),
            Some(_) => unreachable!("names have one of these forms"),
        };
        writeln!(
            source,
            "\tprintf(\"%s=%lld\\n\", \"{name}\", (long long)({expression}));"
        )
        .unwrap();
    }
    source.push_str("\treturn 0;\n}\n");

    let dir = tempfile::tempdir().expect("a temporary folder");
    let (c, bin) = (dir.path().join("abi.c"), dir.path().join("abi"));
    std::fs::write(&c, source).expect("write the C program");
    let include = header().parent().expect("the header's folder").to_owned();
    let out = Command::new(&cc)
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(include)
        .arg("-o")
        .args([&bin, &c])
        .output()
        .expect("run the C compiler");
    assert!(
        out.status.success(),
        "the header does not compile:\n{}",
        String::from_utf8_lossy(&out.stderr)
    );
    let out = Command::new(&bin).output().expect("run the C program");
    assert!(out.status.success());
    let parse = |line: &str| {
        let (name, number) = line.split_once('=').expect("name=number");
        (name.to_owned(), number.parse().expect("a number"))
    };
    Some(
        String::from_utf8(out.stdout)
            .expect("ASCII")
            .lines()
            .map(parse)
            .collect(),
    )
}

#[test]
fn rust_knows_every_name_of_the_header() {
    let in_header = names_in_header();
    assert!(in_header.len() > 100, "the scanner found too few names: {in_header:?}");
    let in_rust: BTreeSet<String> = of_rust().into_keys().collect();
    let missing: Vec<_> = in_header.difference(&in_rust).collect();
    let extra: Vec<_> = in_rust.difference(&in_header).collect();
    assert!(
        missing.is_empty() && extra.is_empty(),
        "only in the header: {missing:?}; only in Rust: {extra:?}"
    );
}

#[test]
fn rust_and_c_agree_on_every_number() {
    let rust = of_rust();
    let Some(c) = of_c(&rust.keys().cloned().collect()) else {
        assert!(
            !Path::new("/etc/p2pmem-kernel").exists(),
            "in the sandbox there must be a C compiler"
        );
        eprintln!("skipped: no C compiler (set CC)");
        return;
    };
    let differ: Vec<_> = rust
        .iter()
        .filter(|(name, number)| c.get(*name) != Some(number))
        .collect();
    assert!(
        differ.is_empty(),
        "Rust differs from C in {differ:?}, C has {:?}",
        differ.iter().map(|(n, _)| c.get(*n)).collect::<Vec<_>>()
    );
}

#[test]
fn no_structure_has_padding() {
    // The fields of each structure fill it completely, so that no byte of kernel memory leaks, and 32-bit programs have
    // the same layout.
    let all = of_rust();
    for name in all.keys().filter_map(|k| k.strip_prefix("alignof ")) {
        let fields = all
            .iter()
            .filter(|(k, _)| k.starts_with(&format!("sizeof {name}.")))
            .map(|(_, v)| v);
        assert_eq!(
            fields.sum::<i128>(),
            all[&format!("sizeof {name}")],
            "{name} has padding"
        );
    }
}

/// Fails if a compiler for 32-bit programs has another layout than this crate.
#[test]
#[cfg(target_arch = "x86_64")]
fn layout_matches_32_bit_programs() {
    let mut source = format!("#include <stddef.h>\n#include \"{}\"\n", header().display());
    for (name, number) in of_rust() {
        let expression = match name.split_once(' ') {
            Some(("offsetof", member)) => member
                .split_once('.')
                .map(|(structure, field)| format!("offsetof(struct {structure}, {field})")),
            Some(("sizeof", what)) if !what.contains('.') => Some(format!("sizeof(struct {what})")),
            _ => None,
        };
        if let Some(expression) = expression {
            source.push_str(&format!("_Static_assert({expression} == {number}, \"{name}\");\n"));
        }
    }
    assert!(source.contains("sizeof(struct p2pmem_event)"), "{source}");
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("layout.c");
    std::fs::write(&file, source).unwrap();
    let cc = std::env::var("CC").unwrap_or_else(|_| "gcc".into());
    let Ok(done) = Command::new(cc).args(["-m32", "-fsyntax-only"]).arg(&file).output() else {
        eprintln!("no C compiler: not tested");
        return;
    };
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn ioctl_list_is_complete() {
    let text = std::fs::read_to_string(header()).expect("the uapi header");
    let defined = text
        .lines()
        .filter(|line| line.starts_with("#define P2PMEM_IOC_") && line.contains("_IO"));
    assert_eq!(
        defined.filter(|line| line.contains("(P2PMEM_IOC_MAGIC, ")).count(),
        p2pmem_sys::P2PMEM_IOCS.len()
    );
}
