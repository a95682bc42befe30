// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the output and exit codes of the commands, in this process with a fake device and a fake sysfs.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use p2pmem::fake::{write_pci_function, write_rule, Fake};
use p2pmemctl::Environment;
use serde_json::Value;

mod common;

struct Machine {
    dir: tempfile::TempDir,
    fake: Fake,
    /// The errno of opening the module's device, or 0.
    open_error: i32,
}

/// Creates a sysfs with the drive nvme0, a drive that is also a provider, and a sound card.
fn machine(fake: Fake) -> Machine {
    let dir = tempfile::tempdir().unwrap();
    let device = |addr: &str, class: &str, name: &str| {
        let files = [
            ("vendor", "0x1b36"),
            ("device", "0x0010"),
            ("class", class),
            ("numa_node", "-1"),
        ];
        let path = format!("pci0000:00/{addr}");
        let folder = write_pci_function(&dir.path().join("sys"), &path, &files).unwrap();
        if !name.is_empty() {
            let class = dir.path().join("sys/class/nvme");
            fs::create_dir_all(&class).unwrap();
            fs::create_dir_all(folder.join("nvme").join(name)).unwrap();
            symlink(folder.join("nvme").join(name), class.join(name)).unwrap();
        }
    };
    device("0000:04:00.0", "0x010802", "nvme0");
    device("0000:05:00.0", "0x010802", "nvme1");
    device("0000:06:00.0", "0x040300", "");
    device("0000:0a:00.0", "0x020700", "");
    Machine {
        dir,
        fake,
        open_error: 0,
    }
}

impl Machine {
    fn root(&self) -> &Path {
        self.dir.path()
    }

    /// Runs the tool; returns its exit code and output.
    fn run(&self, args: &[&str]) -> (u8, String) {
        let (code, out, _) = self.run_all(args);
        (code, out)
    }

    /// Runs the tool; returns its exit code, output, and messages, without colors.
    fn run_all(&self, args: &[&str]) -> (u8, String, String) {
        let (code, out, err) = self.run_styled(args);
        let plain = |text: String| anstream::adapter::strip_str(&text).to_string();
        (code, plain(out), plain(err))
    }

    fn run_styled(&self, args: &[&str]) -> (u8, String, String) {
        let (fake, errno) = (self.fake.clone(), self.open_error);
        let environment = Environment {
            root: self.root().to_owned(),
            open: Box::new(move || match errno {
                0 => Ok(fake.device()),
                errno => Err(p2pmem::Error::Open {
                    path: p2pmem::DEFAULT_PATH.into(),
                    error: std::io::Error::from_raw_os_error(errno),
                }),
            }),
        };
        common::run(&environment, std::iter::once("p2pmemctl").chain(args.iter().copied()))
    }

    fn json(&self, args: &[&str]) -> (u8, Value) {
        let (code, out) = self.run(&[args, &["--json"]].concat());
        (code, document(&out))
    }
}

/// Reads a JSON document, which has the version of its members.
fn document(text: &str) -> Value {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert_eq!(value["schema"], p2pmemctl::SCHEMA, "{value}");
    value
}

#[test]
fn list_shows_providers_aligned() {
    let machine = machine(Fake::example());
    let (code, out) = machine.run(&["list"]);
    assert_eq!(code, 0);
    let expected = "\
ID  DEVICE        KIND     MODE   STATE  DRIVER  BAR    NUMA  SIZE  FREE  LARGEST  BUFFERS  DMABUFS  PINNED
 1  0000:03:00.0  own      paged  live   p2pmem  2+0x0  -     256M  256M     256M        0        0      0B
 2  0000:08:00.0  own      paged  live   p2pmem  2+0x0  -      64M   64M      64M        0        0      0B
 3  0000:05:00.0  adopted  paged  live   nvme    -      -      32M   32M      32M        0        0      0B
";
    assert_eq!(out, expected);
    let (_, json) = machine.json(&["list"]);
    assert_eq!(json["providers"][2]["kind"], "adopted");
    assert_eq!(json["info"]["abi_version"], p2pmem::abi::P2PMEM_ABI_VERSION);
}

#[test]
fn columns_are_selected_as_lsblk_does() {
    let machine = machine(Fake::example());
    for (options, expected) in [
        (
            &["-n", "-o", "device,size"][..],
            "0000:03:00.0  256M\n0000:08:00.0   64M\n0000:05:00.0   32M\n",
        ),
        (&["-nb", "-o", "FREE", "--device", "nvme1"], "33554432\n"),
        (&["--bytes", "--output=ID,USED", "--device=2"], "ID  USED\n 2     0\n"),
        (&["-o", "ID,SIZE", "--device", "3"], "ID  SIZE\n 3   32M\n"),
    ] {
        let (code, out, err) = machine.run_all(&[&["list"], options].concat());
        assert_eq!((code, out.as_str(), err.as_str()), (0, expected, ""), "{options:?}");
    }
    let (_, out) = machine.run(&["list", "-o", "+USE%"]);
    assert!(out.lines().next().unwrap().ends_with("DMABUFS  PINNED  USE%"), "{out}");
    let (code, out, err) = machine.run_all(&["list", "-o", "SIZE,WEIGHT"]);
    assert_eq!((code, out.as_str()), (2, ""));
    assert!(
        err.contains("there is no column \"WEIGHT\": use some of ID, DEVICE"),
        "{err}"
    );
    let (code, _, err) = machine.run_all(&["list", "-J", "-o", "SIZE"]);
    assert!(code == 2 && err.contains("JSON has all fields"), "{err}");
}

/// The commands that print tables, with arguments that need nothing else.
const TABLES: [&[&str]; 9] = [
    &["list"],
    &["topo", "--list"],
    &["stats"],
    &["scan"],
    &["scan", "--clients"],
    &["doctor"],
    &["explain", "1M"],
    &["explain", "--what-if", "1M"],
    &["events", "--timeout", "0"],
];

#[test]
fn cells_of_all_tables_are_words() {
    let machine = machine(Fake::example());
    for command in TABLES {
        let (_, names) = machine.run(&[command, &["-nH"]].concat());
        let columns: Vec<Vec<&str>> = names.lines().map(|line| line.split_whitespace().collect()).collect();
        assert!(columns.len() > 3, "{command:?}: {names}");
        // All columns but those of messages, which may have spaces.
        let messages = ["DETAIL", "FOUND", "MESSAGE", "REMEDY", "VERDICT"];
        let words: Vec<_> = columns
            .iter()
            .map(|c| c[0])
            .filter(|name| !messages.contains(name))
            .collect();
        let (_, out) = machine.run(&[command, &["-o", &words.join(",")]].concat());
        let mut lines = out.lines();
        assert_eq!(
            lines.next().unwrap().split_whitespace().collect::<Vec<_>>(),
            words,
            "{command:?}"
        );
        for line in lines {
            assert_eq!(line.split_whitespace().count(), words.len(), "{command:?}: {line}");
            assert_eq!(line, line.trim_end());
        }
        // A message is the last default column, so that the cells before can be cut.
        let default: Vec<_> = columns.iter().filter(|c| c[1] == "yes").map(|c| c[0]).collect();
        let (_, rest) = default.split_last().unwrap();
        assert!(
            rest.iter().all(|name| !messages.contains(name)),
            "{command:?}: {default:?}"
        );
        // Without a header, there is nothing but rows.
        let (_, out, err) = machine.run_all(&[command, &["-n"]].concat());
        let rows = machine.run(&[command, &["-n", "-o", words[0]]].concat()).1;
        assert_eq!(out.lines().count(), rows.lines().count(), "{command:?}: {out}");
        assert_eq!(err, "", "{command:?}");
    }
}

#[test]
fn rules_are_words_and_remarks_follow() {
    let machine = machine(Fake::example());
    let rule = |name: &str, set: &[(&str, &str)]| {
        write_rule(&machine.root().join("sys/kernel/config"), name, set).unwrap();
    };
    let usage = [
        ("uid", "1000,2000-2999"),
        ("quota", "33554432"),
        ("usage", "uid 1000 4096\nuid 2001 8192"),
    ];
    rule("10-users", &usage);
    let never = "in force, but its action never decides: 05-x always comes first";
    rule(
        "20-deny",
        &[
            ("provider", "0000:03:00.0"),
            ("gid", "7"),
            ("action", "deny"),
            ("status", never),
        ],
    );
    rule(
        "30-off",
        &[("enable", "0"), ("status", "not in force: write 1 to enable")],
    );
    let (code, out) = machine.run(&["rules", "list"]);
    let expected = format!(
        "\
NAME      STATE  MATCHES                      SETS         COUNTS
10-users  on     uid=1000,2000-2999           quota=32M    uid:1000=4K;uid:2001=8K
20-deny   on*    provider=0000:03:00.0;gid=7  action=deny  -
30-off    off    any                          -            -

  20-deny: {never}
  30-off: not in force: write 1 to enable
"
    );
    assert_eq!((code, out), (0, expected));
    let (_, out) = machine.run(&["rules", "list", "-nbo", "uid,quota,device,STATUS"]);
    let expected = format!(
        "1000,2000-2999  33554432  -             in force\n\
         -                      -  0000:03:00.0  {never}\n\
         -                      -  -             not in force: write 1 to enable\n"
    );
    assert_eq!(out, expected);
    let (_, json) = machine.json(&["rules", "list"]);
    assert_eq!(json["rules"][1]["action"], "deny");
    let (_, json) = machine.json(&["rules", "save"]);
    assert_eq!(json["rules"][0]["quota"], 32 << 20);
}

#[test]
fn colors_are_in_cells_and_messages_alone() {
    let machine = machine(Fake::example());
    let (_, out, _) = machine.run_styled(&["list"]);
    assert!(out.contains("\u{1b}[32mlive\u{1b}[0m"), "{out:?}");
    assert!(out.starts_with("\u{1b}[1mID\u{1b}[0m  "), "{out:?}");
    let (_, _, err) = machine.run_styled(&["alloc", "1T"]);
    assert!(err.starts_with("\u{1b}[1m\u{1b}[31mp2pmemctl:\u{1b}[0m "), "{err:?}");
    for command in [&["list"][..], &["doctor"], &["topo"], &["alloc", "1T"]] {
        let (_, out, _) = machine.run_styled(&[command, &["--json"]].concat());
        assert!(!out.contains('\u{1b}'), "{command:?}: {out:?}");
    }
}

#[test]
fn lists_without_providers_have_a_hint() {
    let machine = machine(Fake::new());
    for command in ["list", "topo"] {
        let (code, out, err) = machine.run_all(&[command]);
        assert_eq!((code, out.as_str()), (0, ""));
        assert_eq!(err, "There are no providers. Make one: p2pmemctl publish DEVICE\n");
    }
}

#[test]
fn topo_finds_clients_and_prints_the_matrix() {
    let machine = machine(Fake::example());
    let (code, out) = machine.run(&["topo"]);
    assert_eq!(code, 0);
    let expected = "\
ID  DEVICE        nvme0  nvme1  0000:0a:00.0  NUMA
 1  0000:03:00.0  SW:4   SW:4   --            -
 2  0000:08:00.0  PHB:6  PHB:6  --            -
 3  0000:05:00.0  SW:4   X      --            -

Clients:
  nvme0      0000:04:00.0
  nvme1      0000:05:00.0

Legend (a number after the class: links crossed; *: a port on the path redirects by ACS):
  X     the provider itself
  DEV   another function of the same device
  SW    one PCIe switch: traffic stays in it
";
    assert!(out.starts_with(expected), "{out}");
    assert!(out.ends_with("  --    the client cannot reach the provider\n"), "{out}");
}

#[test]
fn topo_accepts_names_and_prints_json() {
    let machine = machine(Fake::example());
    let (code, json) = machine.json(&["topo", "nvme0", "08:00.0"]);
    assert_eq!(code, 0);
    assert_eq!(json["clients"][0]["addr"], "0000:04:00.0");
    let path = &json["paths"][0];
    assert_eq!((&path["class"], &path["hops"]), (&"same-switch".into(), &4.into()));
    assert_eq!(
        (&path["bandwidth"], &path["acs_redirect"]),
        (&15754.into(), &false.into())
    );
    assert_eq!(json["paths"].as_array().unwrap().len(), 6);
    let (code, out) = machine.run(&["topo", "nvme9"]);
    assert_eq!((code, out.as_str()), (1, ""));
    let (_, out) = machine.run(&["topo", "nvme0", "nvme1", "--device", "3", "--list"]);
    let expected = "\
ID  DEVICE        CLIENT  ADDRESS       CLASS  HOPS  BANDWIDTH  ACS
 3  0000:05:00.0  nvme0   0000:04:00.0  SW        4      15754  no
 3  0000:05:00.0  nvme1   0000:05:00.0  X         0      15754  no
";
    assert_eq!(out, expected);
    let (_, out) = machine.run(&["topo", "nvme0", "-n", "--device", "1"]);
    assert_eq!(out, " 1  0000:03:00.0  SW:4  -\n".trim_start());
}

#[test]
fn alloc_reports_the_location_and_frees_the_buffer() {
    let machine = machine(Fake::example());
    let (code, out) = machine.run(&["alloc", "16M", "--near", "nvme0", "--align", "2M", "--fill", "0x5a"]);
    assert_eq!(code, 0);
    let line = "16 MiB in provider 1 (0000:03:00.0), BAR 2 at offset 0x0, \
                farthest path: SW (one PCIe switch: traffic stays in it)\n\
                The memory is free again. To keep it, use --hold, or --exec COMMAND to run a program with it.\n";
    assert_eq!(out, line);
    let (_, out) = machine.run(&["alloc", "16M", "--near", "nvme0,nvme1"]);
    assert!(
        out.starts_with("16 MiB in provider 3 (0000:05:00.0), farthest path: SW"),
        "no link at all to nvme1: {out}"
    );
    let (_, json) = machine.json(&["alloc", "5000", "--device", "0000:08:00.0"]);
    assert_eq!((&json["provider"], &json["size"]), (&2.into(), &8192.into()));
    assert_eq!(json["explanation"]["verdicts"][1]["code"], "chosen");
    let (_, json) = machine.json(&["list"]);
    assert_eq!(json["info"]["buffers"], 0);
}

#[test]
fn a_refused_alloc_shows_all_verdicts() {
    let machine = machine(Fake::example());
    let (code, out) = machine.run(&["alloc", "1G", "--near", "nvme0"]);
    assert_eq!(code, 1);
    assert!(out.starts_with("refused: No such device (ENODEV)"), "{out}");
    assert!(out.contains("1  0000:03:00.0  too small: 256 MiB in all"), "{out}");
    let (code, json) = machine.json(&["alloc", "1G"]);
    assert_eq!((code, &json["errno"]), (1, &19.into()));
    assert!(
        json["reason"].as_str().unwrap().contains("1 GiB") && json["remedy"].is_string(),
        "{json}"
    );
    assert_eq!(machine.run(&["alloc", "0"]).0, 2);
    assert_eq!(machine.run(&["alloc", "4K", "--align", "3"]).0, 2);
    assert_eq!(machine.run(&["alloc", "4K", "--device", "77"]).0, 1);
}

#[test]
fn alloc_runs_a_command_with_the_buffer_s_location() {
    let machine = machine(Fake::example());
    let out = machine.root().join("out");
    let script = format!(
        "echo $P2PMEM_PROVIDER $P2PMEM_PROVIDER_ADDR $P2PMEM_SIZE $P2PMEM_BAR_OFFSET >{}",
        out.display()
    );
    let (code, _) = machine.run(&["alloc", "4K", "--exec", "sh", "-c", &script]);
    assert_eq!(code, 0);
    assert_eq!(fs::read_to_string(out).unwrap(), "1 0000:03:00.0 4096 0\n");
}

#[test]
fn a_stripe_shows_its_parts() {
    let machine = machine(Fake::example());
    let stripe = ["alloc", "4M", "--strategy", "stripe", "--parts", "2", "--near", "nvme0"];
    let (code, out) = machine.run(&stripe);
    assert_eq!(code, 0);
    let lines: Vec<_> = out.lines().collect();
    assert_eq!(lines[0], "4 MiB in 2 parts");
    assert!(
        lines[1].starts_with("  at offset 0x0: 2 MiB in provider 1 (0000:03:00.0), BAR 2 at offset 0x0"),
        "{out}"
    );
    assert!(
        lines[2].starts_with("  at offset 0x200000: 2 MiB in provider 3 (0000:05:00.0)"),
        "{out}"
    );
    let (_, json) = machine.json(&stripe);
    assert_eq!(
        (&json["size"], &json["parts"][1]["offset"]),
        (&(4 << 20).into(), &(2 << 20).into())
    );
    assert_eq!(json["parts"][1]["provider"], 3);
    let (code, json) = machine.json(&["explain", "4M", "--strategy", "stripe", "--parts", "4"]);
    assert_eq!((code, &json["verdicts"][0]["code"]), (1, &"too-few".into()));
    assert_eq!(machine.run(&["alloc", "4M", "--parts", "2"]).0, 2);
    let (_, json) = machine.json(&["list"]);
    assert_eq!(json["info"]["buffers"], 0);
}

#[test]
fn explain_is_a_dry_run() {
    let machine = machine(Fake::example());
    let (code, out) = machine.run(&["explain", "16M", "--near", "nvme0"]);
    assert_eq!(code, 0);
    let expected = "\
0000:03:00.0 was chosen

ID  DEVICE        VERDICT
 1  0000:03:00.0  chosen: below the same switch as nvme0 (4 hops), 256 MiB free
 2  0000:08:00.0  farther: through the host bridge to nvme0 (6 hops), the chosen one stays in the switch
 3  0000:05:00.0  equal: as good as the chosen one, which came earlier
";
    assert_eq!(out, expected);
    let (code, json) = machine.json(&[
        "explain",
        "16M",
        "--near",
        "nvme0",
        "--device",
        "2",
        "--max-class",
        "SW",
    ]);
    assert_eq!((code, &json["errno"]), (1, &19.into()));
    let codes: Vec<_> = json["verdicts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v["code"].clone())
        .collect();
    assert_eq!(codes, ["not-named", "too-far", "not-named"]);
    let (_, json) = machine.json(&["stats"]);
    assert_eq!(json["stats"][3]["allocs"], 0);
    let (_, out) = machine.run(&["explain", "16M", "--near", "nvme0", "-no", "ID,CODE,FREE"]);
    assert_eq!(out, "1  chosen  256M\n2  class    64M\n3  order    32M\n");
}

#[test]
fn stats_count_allocations() {
    let machine = machine(Fake::example());
    machine.run(&["alloc", "1M"]);
    let (code, out) = machine.run(&["stats"]);
    assert_eq!(code, 0);
    assert!(
        out.contains(" 1  0000:03:00.0       1         1M      1     1M"),
        "{out}"
    );
    assert!(out.lines().any(|line| line.starts_with(" -  total ")), "{out}");
    let (_, json) = machine.json(&["stats", "--device", "1"]);
    assert_eq!(
        (&json["stats"][0]["provider"], &json["stats"][0]["alloc_bytes"]),
        (&1.into(), &(1 << 20).into())
    );
    assert_eq!(machine.run(&["stats", "--device", "9"]).0, 1);
}

#[test]
fn selftest_passes_on_good_memory() {
    let machine = machine(Fake::example());
    let (code, out) = machine.run(&["selftest", "--device", "1", "--size", "200K"]);
    assert_eq!(code, 0, "{out}");
    assert!(out.ends_with("provider 1 (0000:03:00.0): 200 KiB passed\n"), "{out}");
    let (_, json) = machine.json(&["selftest", "--device", "nvme1", "--size", "4K"]);
    assert_eq!((&json["provider"], &json["ok"]), (&3.into(), &true.into()));
}

#[test]
fn events_are_followed_until_the_limit() {
    let machine = machine(Fake::example());
    let (code, out) = machine.run(&["events", "--timeout", "0.01"]);
    let header = "          TIME  EVENT                 ID  HANDLE  COUNT\n";
    assert_eq!((code, out.as_str()), (0, header));
    let (fake, done) = (machine.fake.clone(), Arc::new(AtomicBool::new(false)));
    let heard = done.clone();
    // The tool receives only events after it has opened the device, so a provider is added each millisecond until the
    // tool has ended. The tool's timeout is the limit.
    let adder = std::thread::spawn(move || {
        for domain in 1..120_000 {
            if heard.load(Ordering::Relaxed) {
                return;
            }
            fake.clone().provider(
                p2pmem::PciAddr {
                    domain,
                    bus: 0,
                    devfn: 0,
                },
                4096,
            );
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    });
    let (code, event) = machine.json(&["events", "--count", "1", "--timeout", "60"]);
    done.store(true, Ordering::Relaxed);
    adder.join().unwrap();
    assert_eq!((code, &event["event"]), (0, &"provider-added".into()));
    assert!(event["provider"].as_u64() > Some(3), "{event}");
}

#[test]
fn publish_reports_missing_preconditions() {
    let machine = machine(Fake::example());
    let (code, json) = machine.json(&["publish", "06:00.0"]);
    assert_eq!(code, 1);
    assert!(json["error"].as_str().unwrap().contains("p2pmem/providers"), "{json}");
    assert!(json["remedy"].as_str().unwrap().contains("mount -t configfs"), "{json}");
    let (code, json) = machine.json(&["unpublish", "06:00.0"]);
    assert_eq!(
        (code, json["error"].as_str().unwrap()),
        (1, "0000:06:00.0 is not published by p2pmem")
    );
}

#[test]
fn doctor_s_exit_code_shows_failures() {
    let machine = machine(Fake::example());
    let (code, json) = machine.json(&["doctor"]);
    assert_eq!((code, &json["ok"]), (1, &false.into()));
    assert_eq!(
        (&json["checks"][0]["check"], &json["checks"][0]["level"]),
        (&"module".into(), &"failure".into())
    );
}

#[test]
fn scan_lists_memory_devices_and_clients_without_the_module() {
    let machine = machine(Fake::new());
    let folder = machine.root().join("sys/bus/pci/devices/0000:05:00.0");
    for (file, value) in [
        ("size", "16777216"),
        ("available", "16777216"),
        ("published", "1"),
        ("allocate", ""),
    ] {
        fs::create_dir_all(folder.join("p2pmem")).unwrap();
        fs::write(folder.join("p2pmem").join(file), value).unwrap();
    }
    let (code, out) = machine.run(&["scan"]);
    let line = out.lines().find(|line| line.starts_with("0000:05:00.0")).unwrap();
    assert!(
        code == 0 && out.contains("module p2pmem not loaded, IOMMU none"),
        "{out}"
    );
    assert!(line.contains(" 16M ") && line.contains("adopts the memory"), "{out}");
    assert!(
        out.contains("p2pmem/allocate, as root") && !out.contains("it has no driver"),
        "{out}"
    );
    assert!(out.contains("0000:04:00.0  nvme0"), "{out}");
    let (_, out) = machine.run(&["scan", "--all"]);
    assert!(out.contains("it has no driver"), "{out}");
    let (_, out) = machine.run(&["scan", "--clients", "-no", "device,names"]);
    assert_eq!(out, "0000:04:00.0  nvme0\n0000:05:00.0  nvme1\n0000:0a:00.0  -\n");
    let (_, out) = machine.run(&["scan", "-b", "-o", "size,source"]);
    assert_eq!(out, "    SIZE  SOURCE\n16777216  module\n16777216  sysfs\n");
    let (code, json) = machine.json(&["scan"]);
    assert_eq!(
        (
            code,
            &json["module_loaded"],
            json["memory_devices"].as_array().unwrap().len()
        ),
        (0, &Value::Bool(false), 1)
    );
    let sources = &json["memory_devices"][0]["sources"];
    assert_eq!(sources[1]["availability"], "ready");
    // The capabilities that each source misses are a list in the JSON output, and a column.
    assert_eq!(sources[0]["missing"], serde_json::json!([]));
    let missing = "dma-buf,rules,quotas,revoke,placement,sharing,clearing,attach";
    let (_, out) = machine.run(&["scan", "--all", "-no", "source,missing"]);
    let (by_module, by_sysfs) = ("module  -", format!("sysfs   {missing}"));
    assert!(
        out.lines().any(|line| line == by_module) && out.lines().any(|line| line == by_sysfs),
        "{out}"
    );
    let of_json: Vec<_> = sources[1]["missing"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| m.as_str().unwrap())
        .collect();
    assert_eq!(of_json.join(","), missing);
    assert!(
        out.lines()
            .any(|line| line.starts_with("vfio    direct-io,rules,quotas,")),
        "{out}"
    );
}

const ENOENT: i32 = 2;
const EACCES: i32 = 13;

/// Creates a machine without the module. Below the switch 0000:01:00.0: an accelerator without a driver, an NVIDIA GPU, and
/// a NIC. Below another root port: the drive nvme0 with published memory.
fn machine_without_module() -> Machine {
    let machine = Machine {
        open_error: ENOENT,
        ..machine(Fake::new())
    };
    let sys = machine.root().join("sys");
    fs::remove_dir_all(&sys).unwrap();
    fs::create_dir_all(sys.join("bus/pci/devices")).unwrap();
    let device = |path: &str, class: &str, driver: &str, size: u64| {
        let files = [
            ("vendor", "0x1de5"),
            ("device", "0x0010"),
            ("class", class),
            ("numa_node", "-1"),
        ];
        let folder = write_pci_function(&sys, &format!("pci0000:00/{path}"), &files).unwrap();
        if size > 0 {
            let end = 0x38_0000_0000 + size - 1;
            fs::write(folder.join("resource"), format!("0x3800000000 {end:#x} 0x142204\n")).unwrap();
        }
        if !driver.is_empty() {
            symlink(Path::new("/drivers").join(driver), folder.join("driver")).unwrap();
        }
        folder
    };
    let bridge = "0x060400";
    device("0000:00:01.0", bridge, "", 0);
    device("0000:00:01.0/0000:01:00.0", bridge, "", 0);
    for (port, below, class, driver, size) in [
        ("00", "03", "0x120000", "", 64 << 20),
        ("01", "04", "0x030200", "nvidia", 1 << 30),
        ("02", "05", "0x020700", "mlx5_core", 0),
    ] {
        let port = format!("0000:00:01.0/0000:01:00.0/0000:02:{port}.0");
        device(&port, bridge, "", 0);
        device(&format!("{port}/0000:{below}:00.0"), class, driver, size);
    }
    device("0000:00:02.0", bridge, "", 0);
    let drive = device("0000:00:02.0/0000:08:00.0", "0x010802", "nvme", 0);
    let class = |folder: &Path, class: &str, name: &str| {
        fs::create_dir_all(folder.join(class).join(name)).unwrap();
        fs::create_dir_all(sys.join("class").join(class)).unwrap();
        symlink(folder.join(class).join(name), sys.join("class").join(class).join(name)).unwrap();
    };
    class(&drive, "nvme", "nvme0");
    class(&sys.join("bus/pci/devices/0000:05:00.0"), "infiniband", "mlx5_0");
    fs::create_dir_all(drive.join("p2pmem")).unwrap();
    for (file, value) in [("size", "16777216"), ("available", "16777216"), ("published", "1")] {
        fs::write(drive.join("p2pmem").join(file), value).unwrap();
    }
    machine
}

/// The last message of a command without the module, for a user who is not root.
const ADVICE: &str =
    "Run as root to see ports that redirect by ACS, and load the module (modprobe p2pmem) for the kernel's \
                      decisions.\n";

#[test]
fn topo_without_the_module_is_computed_from_sysfs() {
    let machine = machine_without_module();
    let (code, out, err) = machine.run_all(&["topo", "mlx5_0", "nvme0"]);
    let expected = "\
Computed from sysfs: the module is not loaded. The kernel can decide otherwise:
  - paths through the root complex (PHB, NODE, SYS) count as usable; no host bridge is visible; `p2pmemctl topo` with the \
module shows the kernel's verdicts
  - whether ports redirect by ACS is unknown: only root can read the configuration space of 6 bridges

ID  DEVICE        mlx5_0  nvme0  NUMA
 -  0000:03:00.0  SW:4    PHB:6  -
 -  0000:04:00.0  SW:4    PHB:6  -
 -  0000:08:00.0  PHB:6   X      -

Clients:
";
    assert!(code == 0 && out.starts_with(expected), "{out}");
    assert_eq!(err, ADVICE);
    let (code, out, err) = machine.run_all(&["topo", "mlx5_0", "-no", "DEVICE,CLASS", "--device", "03:00.0"]);
    assert_eq!((code, out.as_str(), err.as_str()), (0, "0000:03:00.0  SW\n", ""));
    let (_, json) = machine.json(&["topo", "mlx5_0"]);
    let computed = &json["computed"];
    assert_eq!(computed["module"], "not-loaded");
    assert_eq!(computed["unreadable_bridges"].as_array().unwrap().len(), 6);
    assert!(
        computed["remedy"].as_str().unwrap().contains("modprobe p2pmem"),
        "{json}"
    );
    let put_release = |release: &str| {
        fs::create_dir_all(machine.root().join("proc/sys/kernel")).unwrap();
        fs::write(machine.root().join("proc/sys/kernel/osrelease"), release).unwrap();
    };
    put_release("7.2.0\n");
    assert_eq!(machine.run_all(&["topo", "mlx5_0"]).2, ADVICE);
    let remedy = || machine.run_all(&["explain", "1M"]).2;
    assert!(remedy().contains("remedy: load the module"), "{}", remedy());
    put_release("6.18.4\n");
    // This kernel cannot load the module.
    assert!(
        remedy().contains(
            "remedy: boot Linux 7.2 or later, then load the module (modprobe p2pmem). Without the module, --what-if"
        ),
        "{}",
        remedy()
    );
    let advice = machine.run_all(&["topo", "mlx5_0"]).2;
    assert!(
        advice.contains("boot Linux 7.2 or later, and load the module"),
        "{advice}"
    );
    assert_eq!(json["providers"], serde_json::json!([]));
    assert_eq!(json["memory_devices"][1]["driver"], "nvidia");
    assert_eq!(
        (
            &json["paths"][2]["addr"],
            &json["paths"][2]["class"],
            &json["paths"][2]["provider"]
        ),
        (&"0000:08:00.0".into(), &"host-bridge".into(), &0.into())
    );
    // All clients of the machine, which include the accelerator and the GPU.
    let (_, json) = machine.json(&["topo"]);
    assert_eq!(
        (
            json["clients"].as_array().unwrap().len(),
            json["paths"].as_array().unwrap().len()
        ),
        (4, 12)
    );
    for (args, words) in [
        (["--device", "1"], "name the device"),
        (["--device", "mlx5_0"], "has no memory to share"),
        (["--device", "mlx5_9"], "mlx5_9"),
    ] {
        let (code, _, err) = machine.run_all(&[&["topo"][..], &args].concat());
        assert!(code == 1 && err.contains(words), "{args:?}: {err}");
    }
}

#[test]
fn root_reads_acs_and_needs_the_module_alone() {
    let machine = machine_without_module();
    for entry in fs::read_dir(machine.root().join("sys/bus/pci/devices")).unwrap() {
        let folder = entry.unwrap().path();
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        let mut config = vec![0u8; 4096];
        config[0x34] = 0x40;
        let kind = match name.as_str() {
            "0000:00:01.0" | "0000:00:02.0" => 0x42,
            "0000:01:00.0" => 0x52,
            _ if name.starts_with("0000:02") => 0x62,
            _ => 0x02,
        };
        config[0x40..0x43].copy_from_slice(&[0x10, 0, kind]);
        if name == "0000:02:00.0" {
            config[0x100..0x104].copy_from_slice(&[0x0d, 0, 0x01, 0]);
            config[0x106] = 0x1d;
        }
        fs::write(folder.join("config"), config).unwrap();
    }
    let (code, out, err) = machine.run_all(&["topo", "mlx5_0"]);
    assert!(
        code == 0 && out.contains("0000:03:00.0  PHB:4*") && out.contains("0000:04:00.0  SW:4 "),
        "{out}"
    );
    assert!(!out.contains("only root"), "{out}");
    assert_eq!(err, "Load the module (modprobe p2pmem) for the kernel's decisions.\n");
}

#[test]
fn without_access_to_the_module_the_answer_is_computed() {
    let mut machine = machine_without_module();
    machine.open_error = EACCES;
    fs::create_dir_all(machine.root().join("sys/module/p2pmem")).unwrap();
    for command in [&["topo", "mlx5_0"][..], &["explain", "--what-if", "1M"]] {
        let (code, out, err) = machine.run_all(command);
        assert!(
            code == 0 && out.contains("may not open the module's device") && out.contains("rules are not known"),
            "{out}"
        );
        assert!(
            err.starts_with("Run as root, or join the group") && err.contains("usermod") && err.lines().count() == 1,
            "{err}"
        );
    }
    let (code, _, err) = machine.run_all(&["explain", "1M"]);
    assert!(code == 1 && err.contains("EACCES") && err.contains("usermod"), "{err}");
    // Another error is no reason to compute an answer.
    machine.open_error = 12;
    let (code, out, err) = machine.run_all(&["topo"]);
    assert!(code == 1 && out.is_empty() && err.contains("ENOMEM"), "{err}");
}

#[test]
fn explain_what_if_decides_without_the_module() {
    let machine = machine_without_module();
    let (code, out, err) = machine.run_all(&["explain", "--what-if", "16M", "--near", "mlx5_0"]);
    let expected = "
0000:04:00.0 would be chosen

ID  DEVICE        CLASS  SIZE  SOURCE  USABLE    VERDICT
 -  0000:03:00.0  SW      64M  module  possible  less space: its largest piece is 64 MiB, the chosen one's 1 GiB
 -  0000:04:00.0  SW       1G  driver  ready     chosen: below the same switch as mlx5_0 (4 hops), 1 GiB free
 -  0000:08:00.0  PHB     16M  module  possible  farther: through the host bridge to mlx5_0 (6 hops), the chosen one stays \
in the switch

What each device needs:
  0000:03:00.0: load the module (modprobe p2pmem), then p2pmemctl publish 0000:03:00.0
  0000:04:00.0: nvidia: dma-buf by ";
    assert!(code == 0 && out.contains(expected), "{out}");
    assert!(
        out.starts_with("Computed from sysfs: the module is not loaded."),
        "{out}"
    );
    assert_eq!(err, ADVICE);
    let (_, out, err) = machine.run_all(&["explain", "--what-if", "16M", "-no", "DEVICE,CODE"]);
    assert_eq!(
        (out.as_str(), err.as_str()),
        ("0000:03:00.0  space\n0000:04:00.0  chosen\n0000:08:00.0  space\n", "")
    );
    let (code, json) = machine.json(&["explain", "--what-if", "16M", "--near", "nvme0", "--max-class", "DEV"]);
    assert_eq!(
        (code, &json["chosen"], &json["module"]),
        (0, &"0000:08:00.0".into(), &false.into())
    );
    assert_eq!(json["computed"]["module"], "not-loaded");
    let candidate = &json["candidates"][1];
    assert_eq!(
        (&candidate["code"], &candidate["source"]["backend"], &candidate["class"]),
        (&"too-far".into(), &"driver".into(), &"host-bridge".into())
    );
    let (code, json) = machine.json(&["explain", "--what-if", "1T"]);
    assert_eq!((code, &json["chosen"], &json["errno"]), (1, &Value::Null, &19.into()));
    let (code, _, err) = machine.run_all(&["explain", "--what-if", "1M", "--near", "mlx5_7"]);
    assert!(code == 1 && err.contains("mlx5_7"), "{err}");
    // Without --what-if, the error says what to do.
    let (code, json) = machine.json(&["explain", "1M"]);
    let remedy = json["remedy"].as_str().unwrap();
    assert!(
        code == 1 && remedy.contains("modprobe p2pmem") && remedy.contains("--what-if"),
        "{json}"
    );
    assert_eq!(json["errno"], 2);
}

#[test]
fn explain_what_if_adds_unpublished_devices_to_the_providers() {
    let mut machine = machine_without_module();
    machine.open_error = 0;
    machine.fake = Fake::new().provider("0000:03:00.0".parse().unwrap(), 64 << 20);
    let (code, out, err) = machine.run_all(&["explain", "--what-if", "16M", "--near", "nvme0"]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.starts_with("0000:08:00.0 would be chosen\n"), "{out}");
    assert!(
        out.contains(" 1  0000:03:00.0  PHB     64M  module  ready     farther: "),
        "{out}"
    );
    assert!(out.contains("  0000:03:00.0: it is a provider\n"), "{out}");
    let (_, json) = machine.json(&["explain", "--what-if", "16M", "--near", "nvme0"]);
    assert_eq!((&json["module"], &json["computed"]), (&true.into(), &Value::Null));
}

#[test]
fn topo_draws_the_machine() {
    let machine = machine_without_module();
    let file = machine.root().join("machine.svg");
    let (code, out, err) = machine.run_all(&["topo", "--svg", file.to_str().unwrap()]);
    assert_eq!((code, out.as_str(), err.as_str()), (0, "", ADVICE));
    let document = fs::read_to_string(&file).unwrap();
    let (_, out, _) = machine.run_all(&["topo", "--svg", "-"]);
    assert_eq!(out, document);
    roxmltree::Document::parse(&document).unwrap();
    for words in [
        "0000:03:00.0",
        "0000:04:00.0, nvidia",
        "mlx5_0 (InfiniBand NIC)",
        "nvme0 (NVMe drive)",
        "PCIe switch",
    ] {
        assert!(document.contains(words), "{words}: {document}");
    }
    let (code, _, err) = machine.run_all(&["topo", "--svg", "-", "--json"]);
    assert!(code == 2 && err.contains("not JSON"), "{err}");
    let (code, _, err) = machine.run_all(&["topo", "--svg", "/nonexistent/file.svg"]);
    assert!(code == 1 && err.contains("cannot write /nonexistent/file.svg"), "{err}");
}

#[test]
fn doctor_of_a_pair_says_what_is_missing() {
    let mut machine = machine_without_module();
    let (code, json) = machine.json(&["doctor", "--pair", "mlx5_0", "03:00.0"]);
    let checks = json["checks"].as_array().unwrap();
    let names: Vec<_> = checks.iter().map(|check| check["check"].as_str().unwrap()).collect();
    assert_eq!((code, names), (1, vec!["pair-path", "pair-iommu", "pair-memory"]));
    assert_eq!(
        (&json["pair"]["class"], &json["pair"]["backend"]),
        (&"same-switch".into(), &Value::Null)
    );
    assert!(
        checks[1]["found"]
            .as_str()
            .unwrap()
            .contains("the NIC uses bus addresses"),
        "{json}"
    );
    let remedy = checks[2]["remedy"].as_str().unwrap();
    assert!(remedy.contains("p2pmemctl publish 0000:03:00.0"), "{json}");
    // The path crosses the root complex, and the IOMMU translates the NIC's addresses.
    let groups = machine.root().join("sys/kernel/iommu_groups/1");
    fs::create_dir_all(&groups).unwrap();
    fs::write(groups.join("type"), "DMA-FQ\n").unwrap();
    symlink(
        &groups,
        machine.root().join("sys/bus/pci/devices/0000:05:00.0/iommu_group"),
    )
    .unwrap();
    let (code, out) = machine.run(&["doctor", "--pair", "mlx5_0", "nvme0"]);
    assert!(
        code == 1 && out.contains("WARN   pair-path") && out.contains("mlx5_0 has DMA-FQ"),
        "{out}"
    );
    for (device, words) in [
        ("0000:04:00.0", "by the driver's interface: nvidia"),
        ("mlx5_0", "has no memory to share"),
        ("0000:99:00.0", "no PCI function 0000:99:00.0"),
        ("7", "only the module knows"),
    ] {
        let (code, out, err) = machine.run_all(&["doctor", "--pair", "mlx5_0", device]);
        assert!(
            code == 1 && (out.clone() + &err).contains(words),
            "{device}: {out}{err}"
        );
    }
    // With the module, the memory is that of the provider. This machine has no NIC of this name.
    machine.open_error = 0;
    machine.fake = Fake::new().provider("0000:03:00.0".parse().unwrap(), 64 << 20);
    for device in ["1", "03:00.0"] {
        let (code, out, err) = machine.run_all(&["doctor", "--pair", "mlx5_0", device]);
        let failed = out
            .lines()
            .any(|line| line.starts_with("FAIL") && line.contains(" pair-registration "));
        assert!(code == 1 && failed && err.is_empty(), "{out}{err}");
    }
    let (code, _, err) = machine.run_all(&["doctor", "--pair", "mlx5_0", "7"]);
    assert!(code == 1 && err.contains("7 is not a provider"), "{err}");
    assert_eq!(machine.json(&["list"]).1["info"]["buffers"], 0);
}

#[test]
fn machine_without_memory_has_a_hint() {
    let machine = Machine {
        open_error: ENOENT,
        ..machine(Fake::new())
    };
    let (code, out, err) = machine.run_all(&["topo"]);
    assert_eq!((code, out.as_str()), (0, ""));
    let lines: Vec<_> = err.lines().collect();
    assert!(
        lines.len() == 2 && lines[0].contains("scan --all") && lines[1].contains("modprobe p2pmem"),
        "{err}"
    );
    let (code, out, _) = machine.run_all(&["explain", "--what-if", "1M"]);
    assert!(
        code == 1 && out.contains("this machine has no device with memory"),
        "{out}"
    );
}

#[test]
fn files_of_rules_are_checked() {
    let machine = machine(Fake::example());
    let path = machine.root().join("rules.toml");
    let file = path.to_str().unwrap();
    fs::write(
        &path,
        r#"
[[rule]]
name = "10-drive"
client = "nvme0"
uid = "root"
max_class = "SW"

[[rule]]
name = "20-quota"
provider = "15B3:101b"
gid = 7
group_quota = "1.5G"
quota = 4096
enabled = false

[[rule]]
name = "30-users"
uid = "root,100000-165535"
group_quota = "1G"
"#,
    )
    .unwrap();
    let (code, rules) = machine.json(&["rules", "test", "--file", file]);
    assert_eq!(code, 0);
    assert_eq!(rules["rules"][0]["client"], "0000:04:00.0");
    assert_eq!(
        (&rules["rules"][0]["uid"], &rules["rules"][0]["max_class"]),
        (&0.into(), &"same-switch".into())
    );
    assert_eq!(rules["rules"][1]["provider"], "15b3:101b");
    assert_eq!(
        (&rules["rules"][1]["group_quota"], &rules["rules"][1]["quota"]),
        (&0x6000_0000.into(), &4096.into())
    );
    assert_eq!(rules["rules"][1]["enabled"], false);
    assert_eq!(rules["rules"][2]["uid"], "0,100000-165535");

    let bad = [
        ("[[rule]]\nname = \"10-a\"\nquotum = 1\n", "quotum"),
        ("[[rule]]\naction = \"deny\"\n", "name"),
        ("[[rule]]\nname = \"10-a\"\nquota = \"lots\"\n", "such as 64K"),
        ("[[rule]]\nname = \"10-a\"\nquota = -1\n", "quota"),
        ("[[rule]]\nname = \"10-a\"\naction = \"permit\"\n", "allow, deny"),
        ("[[rule]]\nname = \"10-a\"\nmax_class = \"near\"\n", "PHB"),
        ("[[rule]]\nname = \"10-a\"\nclient = \"mlx5_9\"\n", "mlx5_9"),
        (
            "[[rule]]\nname = \"10-a\"\nuid = \"nobody-of-that-name\"\n",
            "user nobody-of-that-name does not exist",
        ),
        ("[[rule]]\nname = \"ten\"\naction = \"deny\"\n", "two digits"),
        ("[[rule]]\nname = \"10-a\"\n[[rule]]\nname = \"10-a\"\n", "already"),
        ("[[rules]]\nname = \"10-a\"\n", "rules"),
        ("name = \n", "TOML"),
    ];
    for (text, reason) in bad {
        fs::write(&path, text).unwrap();
        let (code, answer) = machine.json(&["rules", "test", "--file", file]);
        let error = answer["error"].as_str().unwrap_or_default();
        assert!(code > 0 && error.contains(reason), "{text}: {code} {error}");
    }
    let (code, answer) = machine.json(&["rules", "test", "--file", "/nonexistent.toml"]);
    assert!(code == 1 && answer["error"].as_str().unwrap().contains("/nonexistent.toml"));
}

#[test]
fn without_the_module_rules_are_an_error() {
    let machine = machine(Fake::example());
    for command in [
        &["rules", "list"][..],
        &["rules", "save"],
        &["rules", "remove", "10-a"],
        &["apply"],
    ] {
        let (code, answer) = machine.json(command);
        assert_eq!(code, 1, "{command:?}");
        assert!(!answer["error"].as_str().unwrap().is_empty());
    }
    let (code, answer) = machine.json(&["rules", "add", "ten", "--action", "deny"]);
    assert!(
        code == 2 && answer["error"].as_str().unwrap().contains("two digits"),
        "{answer}"
    );
}
