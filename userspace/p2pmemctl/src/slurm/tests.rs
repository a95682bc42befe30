// SPDX-License-Identifier: MIT OR Apache-2.0

use std::fs;

use clap::Parser;
use p2pmem::fake::{configfs_rules, Fake};

use super::*;
use crate::{Cli, Command, Environment};

/// A node with the providers of the example, of which the first is near the second of two sockets.
struct Node {
    root: tempfile::TempDir,
    rules: Rules,
    fake: Fake,
}

impl Node {
    fn new(fake: Fake) -> Self {
        let root = tempfile::tempdir().unwrap();
        let rules = configfs_rules(&root.path().join("sys/kernel/config")).unwrap();
        let write = |path: String, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/sys/kernel/hostname".to_owned(), "a.example\n");
        for cpu in 0..4 {
            // Sockets and NUMA nodes are the same, and their processors alternate.
            let own = if cpu % 2 == 0 { "0,2" } else { "1,3" };
            write(format!("sys/devices/system/node/node{}/cpulist", cpu % 2), own);
            for (file, text) in [
                ("core_cpus_list", cpu.to_string()),
                ("package_cpus_list", own.to_owned()),
                ("physical_package_id", (cpu % 2).to_string()),
            ] {
                write(format!("sys/devices/system/cpu/cpu{cpu}/topology/{file}"), &text);
            }
        }
        Self { root, rules, fake }
    }

    /// Runs `p2pmemctl slurm` with arguments. Returns whether it succeeded, its output, and its messages with the error.
    fn run(&self, args: &[&str]) -> (bool, String, String) {
        let cli = Cli::try_parse_from(["p2pmemctl", "slurm"].iter().chain(args)).unwrap();
        let Command::Slurm { command } = &cli.command else {
            panic!("{args:?}");
        };
        let fake = self.fake.clone();
        let environment = Environment {
            root: self.root.path().to_owned(),
            open: Box::new(move || Ok(fake.device())),
        };
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let mut context = Context {
            environment: &environment,
            json: cli.json,
            progress: false,
            out: &mut out,
            err: &mut err,
        };
        let ran = match command {
            SlurmCommand::Gres(args) => gres(&mut context, args),
            SlurmCommand::Prolog(args) => prolog(&mut context, args, &self.rules),
            SlurmCommand::Epilog(args) => epilog(&mut context, args, &self.rules),
        };
        let error = ran.as_ref().err().map(|error| format!("{error:#}")).unwrap_or_default();
        let (out, err) = (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap());
        (ran.is_ok(), out, err + &error)
    }

    fn prolog(&self, id: &str, uid: &str, gres: &str) -> (bool, String, String) {
        self.run(&["prolog", "--job", id, "--uid", uid, "--gres", gres])
    }

    fn epilog(&self, id: &str, uid: &str) -> (bool, String, String) {
        self.run(&["epilog", "--job", id, "--uid", uid, "--wait", "0"])
    }

    fn hold(&self, uid: u32, bytes: u64) {
        let rules = self.root.path().join("sys/kernel/config/p2pmem/rules");
        fs::write(rules.join(name(uid)).join("usage"), format!("uid {uid} {bytes}\n")).unwrap();
    }
}

/// Asserts that a command failed with one line.
fn failed((good, out, err): (bool, String, String), said: &str) {
    assert!(!good && out.is_empty(), "{out}{err}");
    assert!(err.contains(said) && err.lines().count() == 1, "{err}");
}

#[test]
fn providers_are_resources() {
    let addr = |text: &str| text.parse::<PciAddr>().unwrap();
    let (near, anywhere, other) = (addr("0000:03:00.0"), addr("0000:08:00.0"), addr("0000:04:00.0"));
    let node = Node::new(
        Fake::new()
            .provider(near, 256 << 20)
            .numa_node(1, 1)
            .provider(anywhere, (64 << 20) + 4096)
            .provider(other, 256 << 20)
            .numa_node(3, 1),
    );
    let (good, out, _) = node.run(&["gres"]);
    let expected = "\
# In gres.conf:
NodeName=a Name=p2pmem Type=numa1 Count=512M Cores=2-3 Flags=CountOnly # 0000:03:00.0, 0000:04:00.0
NodeName=a Name=p2pmem Type=any Count=65540K Flags=CountOnly # 0000:08:00.0

# In slurm.conf, added to what it has:
GresTypes=p2pmem
NodeName=a Gres=p2pmem:numa1:512M,p2pmem:any:65540K
";
    assert!(good);
    assert_eq!(out, expected);
    let (_, out, _) = node.run(&["gres", "--json", "--name", "bar", "--node", "n7"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["resources"][0]["bytes"], 512 << 20);
    assert_eq!(json["resources"][0]["cores"], "2-3");
    assert_eq!(json["slurm_conf"][1], "NodeName=n7 Gres=bar:numa1:512M,bar:any:65540K");
    // Slurm takes two lines of one name without a type for duplicates.
    let (_, out, _) = Node::new(Fake::example()).run(&["gres"]);
    let line = "NodeName=a Name=p2pmem Count=352M Flags=CountOnly # 0000:03:00.0, 0000:08:00.0, 0000:05:00.0\n";
    assert!(
        out.contains(line) && out.contains("NodeName=a Gres=p2pmem:352M\n"),
        "{out}"
    );

    // Lines of other nodes and resources stay.
    let file = node.root.path().join("gres.conf");
    let others = "AutoDetect=nvml\nNodeName=b Name=p2pmem Count=1G\nNodeName=a Name=gpu File=/dev/nvidia0\n";
    fs::write(&file, format!("nodename=a NAME=p2pmem Count=1\n{others}")).unwrap();
    for _ in 0..2 {
        let (good, out, err) = node.run(&["gres", "--write", file.to_str().unwrap()]);
        assert!(good && out.starts_with("# In slurm.conf"), "{out}{err}");
        let text = fs::read_to_string(&file).unwrap();
        let own: Vec<_> = expected.lines().skip(1).take(2).collect();
        assert_eq!(text, format!("{others}{}\n", own.join("\n")));
    }
    failed(node.run(&["gres", "--name", "p2p mem"]), "is not the name of a GRES");
    failed(
        node.run(&["gres", "--write", "/nonexistent/gres.conf"]),
        "/nonexistent/gres.conf.part",
    );
    failed(
        Node::new(Fake::new()).run(&["gres"]),
        "there are no providers to describe",
    );
    fs::write(node.root.path().join("proc/sys/kernel/hostname"), "\n").unwrap();
    failed(node.run(&["gres"]), "pass its NodeName of slurm.conf by --node");
}

#[test]
fn jobs_have_limits_until_they_end() {
    let node = Node::new(Fake::example());
    let (good, out, _) = node.prolog("12", "4001", "gpu:1(IDX:0),p2pmem(CNT:67108864)");
    let first = "job 12 of uid 4001 has 64 MiB: rule 50-slurm-4001 limits the user to 64 MiB\n";
    assert!(good);
    assert_eq!(out, first);
    // Again, and another job.
    assert_eq!(node.prolog("12", "4001", "p2pmem:64M").1, first);
    let (_, out, _) = node.prolog("13", "4001", "p2pmem:32M");
    assert!(
        out.contains("has 32 MiB: rule 50-slurm-4001 limits the user to 96 MiB"),
        "{out}"
    );
    assert_eq!(node.rules.get("50-slurm-4001").unwrap().rule.quota, Some(96 << 20));

    node.hold(4001, 64 << 20);
    let (good, out, err) = node.epilog("12", "4001");
    assert!(good);
    assert_eq!(
        out,
        "job 12 of uid 4001 has ended; other jobs of the user have 32 MiB\n"
    );
    assert!(
        err.contains("uid 4001 holds 64 MiB, more than its other jobs have"),
        "{err}"
    );
    assert_eq!(node.rules.get("50-slurm-4001").unwrap().rule.quota, Some(32 << 20));
    failed(
        node.epilog("13", "4001"),
        "uid 4001 still holds 64 MiB after its last job, 13",
    );
    node.hold(4001, 0);
    let (good, out, err) = node.epilog("13", "4001");
    assert_eq!(
        (good, out.as_str(), err.as_str()),
        (true, "job 13 of uid 4001 had no limit\n", "")
    );
    assert!(node.rules.list().unwrap().is_empty());
}

#[test]
fn jobs_without_the_resource_have_no_rule() {
    let node = Node::new(Fake::example());
    for gres in ["", "gpu:1(IDX:0)", "p2pmem:0"] {
        let (good, out, _) = node.prolog("12", "4001", gres);
        assert!(good);
        assert_eq!(out, "job 12 of uid 4001 has no p2pmem: no rule\n");
    }
    let (good, out, _) = node.epilog("12", "4001");
    assert_eq!((good, out.as_str()), (true, "job 12 of uid 4001 had no limit\n"));
    assert!(node.rules.list().unwrap().is_empty());
    let (_, out, _) = node.run(&[
        "prolog",
        "--json",
        "--job",
        "12",
        "--uid",
        "4001",
        "--gres",
        "p2pmem:4K",
    ]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&json["bytes"], &json["rule"]), (&4096.into(), &"50-slurm-4001".into()));
}

#[test]
fn failures_are_one_line() {
    let node = Node::new(Fake::example());
    failed(
        node.prolog("12", "4001", "p2pmem:lots"),
        "has no amount of bytes: the form is p2pmem:64M",
    );
    failed(
        node.run(&[
            "prolog",
            "--job",
            "1",
            "--uid",
            "2",
            "--scontrol",
            "/nonexistent/scontrol",
        ]),
        "the GRES of job 1 are unknown",
    );
    // Without the module, a job without the resource starts, and one with the resource does not.
    fs::remove_dir_all(node.root.path().join("sys/kernel/config/p2pmem")).unwrap();
    assert!(node.prolog("12", "4001", "gpu:1").0);
    failed(
        node.prolog("12", "4001", "p2pmem:4K"),
        "job 12 of uid 4001 has no limit, and must not start",
    );
    assert!(node.epilog("12", "4001").0);
    for args in [&["--job", "x"][..], &["--job", "-1"], &["--uid", "alice"]] {
        let all = [&["p2pmemctl", "slurm", "epilog"], args].concat();
        assert!(Cli::try_parse_from(all).is_err(), "{args:?}");
    }
}

#[test]
fn apply_keeps_the_rules_of_jobs() {
    // The rules of other tests are those of the fake; apply writes to the files themselves.
    let node = Node::new(Fake::example());
    node.prolog("12", "4001", "p2pmem:4K");
    let environment = Environment {
        root: node.root.path().to_owned(),
        open: Box::new(|| unreachable!("rules need no device")),
    };
    fs::create_dir_all(node.root.path().join("sys/kernel/config/p2pmem/providers")).unwrap();
    let folder = node.root.path().join("etc/p2pmem");
    fs::create_dir_all(&folder).unwrap();
    let run = |args: &[&str]| {
        let cli = Cli::try_parse_from(["p2pmemctl"].iter().chain(args)).unwrap();
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let mut context = Context {
            environment: &environment,
            json: false,
            progress: false,
            out: &mut out,
            err: &mut err,
        };
        let code = crate::exit_code(&mut context, &cli.command);
        (code, String::from_utf8([out, err].concat()).unwrap())
    };
    for command in [&["apply"][..], &["rules", "load", "--only"]] {
        assert_eq!(
            run(command),
            (0, "unchanged: 50-slurm-4001\n".to_owned()),
            "{command:?}"
        );
    }
    assert_eq!(run(&["rules", "save"]), (0, String::new()));
    fs::write(
        folder.join("r.toml"),
        "[[rule]]\nname = \"50-slurm-7\"\naction = \"deny\"\n",
    )
    .unwrap();
    let (code, said) = run(&["apply"]);
    assert!(code == 1 && said.contains("choose another one"), "{said}");
}
