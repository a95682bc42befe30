// SPDX-License-Identifier: MIT OR Apache-2.0

use std::fs;
use std::process::Command as Process;

use clap_complete::engine;
use p2pmem::fake::{write_pci_function, write_rule, Fake};

use super::*;

/// Creates a machine with the fake device's providers, a drive, an accelerator without a driver, a NIC, and a rule.
fn machine(root: &Path) -> Machine {
    let put = |path: &str, text: &str| {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    let device = |addr: &str, class: &str| {
        let folder = format!("sys/devices/pci0000:00/{addr}");
        let files = [
            ("vendor", "0x1b36"),
            ("device", "0x0010"),
            ("class", class),
            ("numa_node", "-1"),
        ];
        write_pci_function(&root.join("sys"), &format!("pci0000:00/{addr}"), &files).unwrap();
        folder
    };
    let drive = device("0000:04:00.0", "0x010802");
    fs::create_dir_all(root.join(drive).join("nvme/nvme0")).unwrap();
    let accelerator = device("0000:0b:00.0", "0x120000");
    let bar = "0x0000000000000000 0x000000000fffffff 0x0000000000142204\n";
    put(&format!("{accelerator}/resource"), bar);
    put("sys/class/infiniband/mlx5_0/node_type", "1");
    write_rule(&root.join("sys/kernel/config"), "10-lab", &[]).unwrap();
    for (file, text) in [("enable", "1"), ("status", "in force"), ("usage", "")] {
        put(&format!("sys/kernel/config/p2pmem/providers/0000:03:00.0/{file}"), text);
    }
    let root = root.to_owned();
    let fake = Fake::example();
    Arc::new(move || {
        let fake = fake.clone();
        Environment {
            root: root.clone(),
            open: Box::new(move || Ok(fake.device())),
        }
    })
}

/// Returns the candidates for the last word of a line.
fn complete_line(machine: &Machine, line: &str) -> Vec<String> {
    let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
    let last = words.len() - 1;
    let all = engine::complete(&mut command(machine), words, last, None).unwrap();
    all.iter()
        .map(|value| value.get_value().to_string_lossy().into_owned())
        .collect()
}

#[test]
fn values_are_those_of_the_machine() {
    let dir = tempfile::tempdir().unwrap();
    let machine = machine(dir.path());
    let providers = ["0000:03:00.0", "0000:08:00.0", "0000:05:00.0"];
    for verb in ["list", "stats", "topo", "selftest", "alloc", "explain", "rules test"] {
        assert_eq!(
            complete_line(&machine, &format!("p2pmemctl {verb} --device 0")),
            providers,
            "{verb}"
        );
    }
    for (line, expected) in [
        ("publish 0", &["0000:0b:00.0"][..]),
        ("publish --device=0000:0b", &["--device=0000:0b:00.0"]),
        ("unpublish 0", &["0000:03:00.0"]),
        ("topo n", &["nvme0"]),
        ("topo 0", &["0000:0b:00.0"]),
        ("alloc 1M --near nvme0,0", &["nvme0,0000:0b:00.0"]),
        ("selftest --nic m", &["mlx5_0"]),
        ("rules remove 1", &["10-lab"]),
        ("rules add 20-x --client n", &["nvme0"]),
        ("rules add 20-x --max-class N", &["NODE"]),
        ("list -o SIZE,us", &["SIZE,USED", "SIZE,USE%"]),
        ("list -o +u", &["+USED", "+USE%"]),
        ("doctor --output l", &["LEVEL"]),
        ("doctor --pair m", &["mlx5_0"]),
        ("doctor --pair mlx5_0 0", &["0000:0b:00.0"]),
        ("explain -o S", &["SIZE", "SOURCE"]),
        ("scan -o MISS", &["MISSING"]),
        ("scan --clients -o DM", &["DMABUF"]),
        ("scan --clients -o +device,name", &["+device,NAMES"]),
        ("scan -o DRI", &["DRIVER"]),
    ] {
        assert_eq!(
            complete_line(&machine, &format!("p2pmemctl {line}")),
            expected,
            "{line}"
        );
    }
}

#[test]
fn a_candidate_has_a_description() {
    let dir = tempfile::tempdir().unwrap();
    let machine = machine(dir.path())();
    let help = |all: Vec<CompletionCandidate>| all[0].get_help().unwrap().to_string();
    assert_eq!(help(providers(&machine)), "provider 1, own, 256M of 256M free");
    assert_eq!(help(clients(&machine)), "0000:04:00.0, no driver");
    assert_eq!(help(publishable(&machine)), "no driver, BAR 0 of 256M");
    assert_eq!(help(published(&machine)), "in force");
}

#[test]
fn without_the_module_nothing_is_offered() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().to_owned();
    let machine: Machine = Arc::new(move || Environment {
        root: root.clone(),
        open: Box::new(|| p2pmem::Device::open_path("/nonexistent")),
    });
    for line in [
        "publish 0",
        "unpublish 0",
        "list --device 0",
        "topo --device 0",
        "topo 0",
        "rules remove 1",
        "selftest --nic m",
    ] {
        assert_eq!(complete_line(&machine, &format!("p2pmemctl {line}")), [""; 0], "{line}");
    }
}

#[test]
fn without_the_module_topo_completes_devices_with_memory() {
    let dir = tempfile::tempdir().unwrap();
    machine(dir.path());
    let root = dir.path().to_owned();
    let machine: Machine = Arc::new(move || Environment {
        root: root.clone(),
        open: Box::new(|| p2pmem::Device::open_path("/nonexistent")),
    });
    assert_eq!(complete_line(&machine, "p2pmemctl topo --device 0"), ["0000:0b:00.0"]);
    assert_eq!(complete_line(&machine, "p2pmemctl list --device 0"), [""; 0]);
}

#[test]
fn bash_gets_whole_words_and_the_ends_of_the_answers() {
    let mut script = Vec::new();
    registration(Shell::Bash, &mut script).unwrap();
    // Stands for the program: prints the words, and answers with two addresses.
    let program = "p2pmemctl() {
        shift
        printf '<%s>' \"$_CLAP_COMPLETE_INDEX\" \"$@\" >&3
        printf '0000:03:00.0\\v0000:04:00.0'
    }\n";
    let test = "COMP_LINE='p2pmemctl topo 0000:0' COMP_POINT=21
        _p2pmemctl p2pmemctl 0 : 3>&1
        printf ' %s' \"${COMPREPLY[@]}\"
        COMP_LINE='p2pmemctl topo ' COMP_POINT=15
        echo
        _p2pmemctl p2pmemctl '' topo 3>&1
        printf ' %s' \"${COMPREPLY[@]}\"";
    let script = format!("{}{program}{test}", String::from_utf8(script).unwrap());
    let output = Process::new("bash").args(["--norc", "-c", &script]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let expected = "<2><p2pmemctl><topo><0000:0> 03:00.0 04:00.0\n\
                    <2><p2pmemctl><topo><> 0000:03:00.0 0000:04:00.0";
    assert_eq!(said, expected, "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn every_shell_has_a_script() {
    for shell in [Shell::Bash, Shell::Elvish, Shell::Fish, Shell::Zsh] {
        let mut script = Vec::new();
        registration(shell, &mut script).unwrap();
        let script = String::from_utf8(script).unwrap();
        assert!(
            script.contains("p2pmemctl") && script.contains(VARIABLE),
            "{shell:?}: {script}"
        );
    }
}
