// SPDX-License-Identifier: MIT OR Apache-2.0

//! Writes the man pages and completion scripts of p2pmem's programs from the definitions of their command lines.
//!
//! ```text
//! p2pmem-man FOLDER
//! ```
//!
//! The pages go to `FOLDER/man1`, the scripts to `FOLDER/bash`, `FOLDER/zsh` and `FOLDER/fish`. The scripts of p2pmemctl call
//! the program for each completion, which knows the devices of the machine.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use anyhow::{bail, Context, Result};
use clap::{Command, CommandFactory};
use clap_complete::Shell;

/// The references at the end of pages, by the beginning of the page's name. The first entry that fits counts.
const SEE_ALSO: &[(&str, &str)] = &[
    ("p2pmemctl-apply", "p2pmem.toml(5)"),
    ("p2pmemctl-rules", "p2pmem.toml(5), subuid(5)"),
    (
        "p2pmemctl",
        "p2pmem.toml(5), p2pmem-perf(1), p2pmem-collectives(1), p2pmem-exporter(1), p2pmem-recorder(1)",
    ),
    ("p2pmem-perf", "p2pmemctl(1)"),
    ("p2pmem-collectives", "p2pmemctl(1), p2pmem-perf(1), mpirun(1), srun(1)"),
    ("p2pmem-exporter", "p2pmemctl(1)"),
    ("p2pmem-recorder", "p2pmemctl(1), p2pmem-exporter(1)"),
];

/// Sections of pages that command lines do not have, by the page's name.
const SECTIONS: &[(&str, &str)] = &[
    ("p2pmem-collectives", include_str!("p2pmem-collectives.roff")),
    ("p2pmem-recorder", include_str!("p2pmem-recorder.roff")),
];

/// The program whose completions know the machine.
const CTL: &str = "p2pmemctl";

fn main() -> Result<()> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let [folder] = arguments.as_slice() else {
        bail!("usage: p2pmem-man FOLDER");
    };
    generate(Path::new(folder))
}

/// Returns the command lines of all programs.
fn programs() -> [Command; 5] {
    [
        p2pmemctl::Cli::command(),
        p2pmem_perf::cli::Cli::command(),
        p2pmem_collectives::cli::Cli::command(),
        p2pmem_exporter::command(),
        p2pmem_recorder::cli::Cli::command(),
    ]
}

/// Writes everything below `folder`.
fn generate(folder: &Path) -> Result<()> {
    let shells = [(Shell::Bash, "bash"), (Shell::Zsh, "zsh"), (Shell::Fish, "fish")];
    for name in shells.iter().map(|(_, name)| *name).chain(["man1"]) {
        let folder = folder.join(name);
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    }
    for program in programs() {
        let name = program.get_name().to_owned();
        for (shell, folder_name) in shells {
            let folder = folder.join(folder_name);
            let written = if name == CTL {
                registration(shell, &folder)
            } else {
                clap_complete::generate_to(shell, &mut program.clone(), &name, folder).map(drop)
            };
            written.with_context(|| format!("{name}: completion for {shell}"))?;
        }
        let man = folder.join("man1");
        clap_mangen::generate_to(program.clone(), &man).with_context(|| format!("{name}: man pages"))?;
        refer(&man, &name)?;
    }
    Ok(())
}

/// Writes the script of p2pmemctl to the file that clap_complete would write.
fn registration(shell: Shell, folder: &Path) -> std::io::Result<()> {
    let (own, file) = match shell {
        Shell::Zsh => (p2pmemctl::Shell::Zsh, format!("_{CTL}")),
        Shell::Fish => (p2pmemctl::Shell::Fish, format!("{CTL}.fish")),
        _ => (p2pmemctl::Shell::Bash, format!("{CTL}.bash")),
    };
    p2pmemctl::registration(own, &mut File::create(folder.join(file))?)
}

/// Adds [`SECTIONS`] and the references of [`SEE_ALSO`] to the pages of a program.
fn refer(man: &Path, program: &str) -> Result<()> {
    for entry in fs::read_dir(man)? {
        let path = entry?.path();
        let Some(page) = path.file_stem().and_then(|stem| stem.to_str()) else {
            continue;
        };
        let is_own = page == program || page.starts_with(&format!("{program}-"));
        let Some((_, also)) = SEE_ALSO.iter().find(|(name, _)| page.starts_with(name)) else {
            continue;
        };
        if is_own {
            let also = if page == program {
                (*also).to_owned()
            } else {
                format!("{program}(1), {also}")
            };
            let mut file = File::options().append(true).open(&path)?;
            if let Some((_, sections)) = SECTIONS.iter().find(|(name, _)| page == *name) {
                file.write_all(sections.as_bytes())?;
            }
            writeln!(file, ".SH \"SEE ALSO\"\n{}", also.replace('-', "\\-"))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the names of a command's pages and of those below it.
    fn pages(command: &Command, prefix: &str) -> Vec<String> {
        let name = format!("{prefix}{}", command.get_name());
        let below = command.get_subcommands().filter(|verb| !verb.is_hide_set());
        let mut pages: Vec<String> = below.flat_map(|verb| pages(verb, &format!("{name}-"))).collect();
        pages.push(name);
        pages
    }

    #[test]
    fn every_verb_has_a_page_and_every_program_its_completions() {
        let folder = tempfile::tempdir().unwrap();
        generate(folder.path()).unwrap();
        for program in programs() {
            for page in pages(&program, "") {
                let text = fs::read_to_string(folder.path().join(format!("man1/{page}.1"))).unwrap();
                assert!(
                    text.contains(".SH NAME") && text.contains(".SH SYNOPSIS"),
                    "{page}: {text}"
                );
                assert_eq!(text.matches("SEE ALSO").count(), 1, "{page}: {text}");
            }
            let name = program.get_name();
            for script in [
                format!("bash/{name}.bash"),
                format!("zsh/_{name}"),
                format!("fish/{name}.fish"),
            ] {
                let text = fs::read_to_string(folder.path().join(&script)).unwrap();
                assert!(text.contains(name), "{script}");
            }
        }
        let add = fs::read_to_string(folder.path().join("man1/p2pmemctl-rules-add.1")).unwrap();
        assert!(add.contains("group_quota") || add.contains("group\\-quota"), "{add}");
        assert!(add.contains("p2pmem.toml(5)"), "{add}");
        let recorder = fs::read_to_string(folder.path().join("man1/p2pmem-recorder.1")).unwrap();
        let places = ["\"EXIT STATUS\"", "SERVICE", "FILES", "EXAMPLES", "\"SEE ALSO\""]
            .map(|name| recorder.find(&format!(".SH {name}")));
        assert!(places.is_sorted() && places[0].is_some(), "{places:?}: {recorder}");
        let collectives = fs::read_to_string(folder.path().join("man1/p2pmem-collectives.1")).unwrap();
        assert!(collectives.contains("\nmpirun \\-np 4"), "{collectives}");
    }
}
