// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;
use std::fs;
use std::path::Path;

use p2pmem::fake::{write_pci_function, Fake};
use p2pmem::{Device, PciAddr, Request};
use p2pmem_drawing::layout::{Layout, Rect};

use crate::environment::Environment;

/// The name of an NVMe drive that XML would misread.
const NAME: &str = "<mlx5&\"0'>";

/// A machine with a sysfs and a module.
struct Machine {
    dir: tempfile::TempDir,
    fake: Option<Fake>,
}

impl Machine {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("sys/bus/pci/devices")).unwrap();
        fs::create_dir_all(dir.path().join("proc/sys/kernel")).unwrap();
        fs::write(dir.path().join("proc/sys/kernel/osrelease"), "7.2.0-test\n").unwrap();
        Self { dir, fake: None }
    }

    /// Adds a function at a path below `sys/devices`, with a BAR of this size.
    fn add(&self, path: &str, class: &str, size: u64) {
        let files = [
            ("vendor", "0x1de5"),
            ("device", "0x0001"),
            ("class", class),
            ("numa_node", "0"),
        ];
        let folder = write_pci_function(&self.dir.path().join("sys"), path, &files).unwrap();
        if size > 0 {
            let end = 0x38_0000_0000 + size - 1;
            fs::write(folder.join("resource"), format!("0x3800000000 {end:#x} 0x142204\n")).unwrap();
        }
    }

    /// Gives a function a name of a class.
    fn name(&self, addr: &str, class: &str, name: &str) {
        let folder = self.dir.path().join("sys/bus/pci/devices").join(addr);
        fs::create_dir_all(folder.join(class).join(name)).unwrap();
    }

    /// Creates a machine with 8 accelerators and 8 NICs: two host bridges, each with two root ports, each with a switch
    /// with 2 accelerators and 2 NICs.
    fn large() -> Self {
        let machine = Self::new();
        for host in [0, 0x80] {
            for switch in 1..3 {
                let root = format!("pci0000:{host:02x}/0000:{host:02x}:{switch:02x}.0");
                machine.add(&root, "0x060400", 0);
                let bus = host + switch * 0x10;
                let up = format!("{root}/0000:{bus:02x}:00.0");
                machine.add(&up, "0x060400", 0);
                for slot in 0..4 {
                    let down = format!("{up}/0000:{:02x}:{slot:02x}.0", bus + 1);
                    machine.add(&down, "0x060400", 0);
                    let addr = format!("0000:{:02x}:00.0", bus + 2 + slot);
                    if slot % 2 == 0 {
                        machine.add(&format!("{down}/{addr}"), "0x120000", 64 << 30);
                    } else {
                        machine.add(&format!("{down}/{addr}"), "0x020700", 0);
                        machine.name(&addr, "infiniband", &format!("mlx5_{bus:x}_{slot}"));
                        machine.name(&addr, "net", &format!("ens{bus}f{slot}np0"));
                    }
                }
            }
        }
        machine
    }

    /// Returns the addresses of the devices without bridges below them.
    fn devices(&self) -> Vec<PciAddr> {
        let all = devices_in(&self.dir.path().join("sys")).unwrap();
        all.iter().filter(|d| d.class >> 8 != 0x0604).map(|d| d.addr).collect()
    }

    /// Makes the accelerators providers, one with a buffer.
    fn published(mut self) -> (Self, Device) {
        let devices = devices_in(&self.dir.path().join("sys")).unwrap();
        let accelerators = devices.iter().filter(|d| d.class >> 16 == 0x12);
        let fake = accelerators.fold(Fake::new(), |fake, device| fake.provider(device.addr, 1 << 20));
        let device = fake.device();
        self.fake = Some(fake);
        (self, device)
    }

    fn environment(&self) -> Environment {
        let fake = self.fake.clone();
        Environment {
            root: self.dir.path().to_owned(),
            open: Box::new(move || match &fake {
                Some(fake) => Ok(fake.device()),
                None => Device::open_path("/nonexistent/p2pmem"),
            }),
        }
    }

    /// Calls a function with a context. Returns its result, the output, and the messages.
    fn with<T>(&self, f: impl FnOnce(&mut Context<'_>) -> T) -> (T, String, String) {
        let environment = self.environment();
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let result = f(&mut Context {
            environment: &environment,
            json: false,
            progress: false,
            out: &mut out,
            err: &mut err,
        });
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (result, text(out), text(err))
    }

    fn layout(&self) -> Layout {
        let sys = self.dir.path().join("sys");
        let devices = devices_in(&sys).unwrap();
        let clients: Vec<_> = devices
            .iter()
            .filter(|d| d.is_likely_client())
            .map(p2pmem::PciDevice::client)
            .collect();
        let ((scene, _), ..) = self.with(|context| scene(context, &clients).unwrap());
        Drawing::new(&sys, &devices, &scene).layout
    }

    /// Returns the document, and the messages.
    fn draw(&self) -> (String, String) {
        let devices = devices_in(&self.dir.path().join("sys")).unwrap();
        let clients: Vec<_> = devices
            .iter()
            .filter(|d| d.is_likely_client())
            .map(p2pmem::PciDevice::client)
            .collect();
        let (result, out, err) = self.with(|context| draw(context, &clients, Path::new("-")));
        assert_eq!(result.unwrap(), Outcome::Done);
        (out, err)
    }
}

fn overlap(a: &Rect, b: &Rect) -> bool {
    a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height
}

fn is_in(outer: &Rect, inner: &Rect) -> bool {
    outer.x <= inner.x
        && outer.y <= inner.y
        && outer.x + outer.width >= inner.x + inner.width
        && outer.y + outer.height >= inner.y + inner.height
}

/// Fails if boxes or texts overlap, or a text exceeds its box or the drawing.
fn check(layout: &Layout) {
    let whole = Rect {
        x: 0,
        y: 0,
        width: layout.width,
        height: layout.height,
    };
    for (n, one) in layout.boxes.iter().enumerate() {
        assert!(is_in(&whole, &one.rect), "{one:?} exceeds the drawing");
        for other in &layout.boxes[n + 1..] {
            assert!(!overlap(&one.rect, &other.rect), "{one:?} overlaps {other:?}");
        }
        for text in &one.texts {
            assert!(is_in(&one.rect, &text.area()), "{text:?} exceeds {:?}", one.rect);
            if let Some((bar, used)) = one.usage {
                assert!(!overlap(&bar, &text.area()) && used <= bar.width, "{text:?} {bar:?}");
                assert!(is_in(&one.rect, &bar));
            }
        }
        for text in &layout.texts {
            assert!(!overlap(&one.rect, &text.area()), "{text:?} overlaps {one:?}");
        }
        for link in &layout.links {
            let line = Rect {
                x: link.from,
                y: link.y,
                width: link.to - link.from,
                height: 1,
            };
            assert!(!overlap(&one.rect, &line), "{link:?} crosses {one:?}");
        }
    }
    let texts: Vec<_> = layout
        .boxes
        .iter()
        .flat_map(|one| &one.texts)
        .chain(&layout.texts)
        .collect();
    for (n, one) in texts.iter().enumerate() {
        assert!(is_in(&whole, &one.area()), "{one:?} exceeds the drawing");
        for other in &texts[n + 1..] {
            assert!(!overlap(&one.area(), &other.area()), "{one:?} overlaps {other:?}");
        }
    }
    // A band is in another one, or beside it.
    for (n, one) in layout.bands.iter().enumerate() {
        for other in &layout.bands[n + 1..] {
            assert!(!overlap(one, other) || is_in(one, other), "{one:?} {other:?}");
        }
    }
}

/// Returns the texts of a document, which has to be well-formed.
fn texts(document: &str) -> Vec<String> {
    let parsed = roxmltree::Document::parse(document).unwrap_or_else(|error| panic!("{error}: {document}"));
    let all = parsed.descendants().filter(|node| node.has_tag_name("text"));
    all.map(|node| node.text().unwrap_or_default().trim().to_owned())
        .collect()
}

#[test]
fn large_machine_is_drawn_without_overlaps() {
    let machine = Machine::large();
    assert_eq!(machine.devices().len(), 16);
    let layout = machine.layout();
    check(&layout);
    assert_eq!(layout.bands.len(), 4, "one for each switch");
    let (document, messages) = machine.draw();
    let texts = texts(&document);
    for addr in machine.devices() {
        let addr = addr.to_string();
        assert_eq!(texts.iter().filter(|text| text.contains(&addr)).count(), 1, "{addr}");
    }
    for words in [
        "mlx5_10_1, ens16f1np0 (InfiniBand NIC)",
        "64G, possible by module",
        "PCIe switch",
        "NUMA node 0",
    ] {
        assert!(texts.iter().any(|text| text == words), "{words}: {texts:#?}");
    }
    let texts = texts.join(" ");
    assert!(
        texts.contains("the module is not loaded") && texts.contains("redirect by ACS is unknown"),
        "{texts}"
    );
    assert!(
        messages.starts_with("Run as root") && messages.contains("modprobe p2pmem"),
        "{messages}"
    );
    // The same machine gives the same document.
    assert_eq!(machine.draw().0, document);
}

#[test]
fn devices_below_a_switch_are_in_its_band() {
    let machine = Machine::large();
    let layout = machine.layout();
    for band in &layout.bands {
        let inside: Vec<_> = layout.boxes.iter().filter(|one| is_in(band, &one.rect)).collect();
        let named = |words: &str| {
            let count = inside.iter().filter(|one| one.texts[0].content.contains(words)).count();
            assert_eq!(count, 2, "{words}");
        };
        named("InfiniBand NIC");
        named("accelerator");
    }
}

#[test]
fn providers_show_used_memory_and_holders() {
    let (machine, device) = Machine::large().published();
    let provider = device.providers().unwrap().remove(0);
    let buffer = device.alloc(&Request::new(256 << 10).provider(provider.id)).unwrap();
    let table = |count: usize| {
        let mut table = "id function size owner\n".to_owned();
        for n in 0..count {
            table += &format!("{n} {} 65536 pid {n} (a program with <a> name)\n", provider.addr);
        }
        table
    };
    let fake = machine.fake.clone().unwrap();
    fake.holders(Some(&table(5)));
    let layout = machine.layout();
    check(&layout);
    let bars: Vec<_> = layout.boxes.iter().filter_map(|one| one.usage).collect();
    assert_eq!(bars.len(), 8);
    assert_eq!((bars[0].1, bars[1].1), (bars[0].0.width / 4, 0));
    let (document, messages) = machine.draw();
    let all = texts(&document);
    for words in [
        "provider 1: 256K of 1M used",
        "64K pid 0 (a program with <a> name)",
        "and 2 more",
    ] {
        assert!(all.iter().any(|text| text == words), "{words}: {all:#?}");
    }
    assert_eq!(messages, "");
    // A user who is not root does not learn the holders.
    fake.holders(None);
    let (document, messages) = machine.draw();
    assert!(texts(&document).iter().any(|text| text == "buffers: 1"));
    assert_eq!(messages, "Run as root to see who holds the buffers.\n");
    drop(buffer);
}

#[test]
fn names_of_any_characters_are_escaped_and_shortened() {
    let machine = Machine::new();
    machine.add("pci0000:00/0000:00:01.0", "0x010802", 0);
    machine.name("0000:00:01.0", "nvme", NAME);
    machine.add("pci0000:00/0000:00:02.0", "0x020000", 0);
    machine.name("0000:00:02.0", "net", "]]>\u{1}\u{1b}[31m");
    machine.add("pci0000:00/0000:00:03.0", "0x020000", 0);
    machine.name("0000:00:03.0", "net", &"\u{4e2d}".repeat(60));
    check(&machine.layout());
    let (document, _) = machine.draw();
    assert!(document.contains("&lt;mlx5&amp;"), "{document}");
    let texts = texts(&document);
    for words in [
        &format!("{NAME} (NVMe drive)"),
        "]]>\u{fffd}\u{fffd}[31m (NIC)",
        &format!("{}…", "\u{4e2d}".repeat(45)),
    ] {
        assert!(texts.iter().any(|text| text == words), "{words}: {texts:#?}");
    }
}

#[test]
fn nested_switches_and_several_domains_have_places() {
    let machine = Machine::new();
    let first = "pci0000:00/0000:00:01.0";
    for path in [
        "",
        "/0000:01:00.0",
        "/0000:01:00.0/0000:02:00.0",
        "/0000:01:00.0/0000:02:00.0/0000:03:00.0",
    ] {
        machine.add(&format!("{first}{path}"), "0x060400", 0);
    }
    let second = format!("{first}/0000:01:00.0/0000:02:00.0/0000:03:00.0/0000:04:00.0");
    machine.add(&second, "0x060400", 0);
    machine.add(&format!("{second}/0000:05:00.0"), "0x120000", 1 << 20);
    machine.add(&format!("{first}/0000:01:00.0/0000:02:01.0"), "0x060400", 0);
    machine.add(
        &format!("{first}/0000:01:00.0/0000:02:01.0/0000:06:00.0"),
        "0x010802",
        0,
    );
    // A device on a root bus of another domain, as behind a VMD controller.
    machine.add(
        "pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0",
        "0x010802",
        0,
    );
    let folder = machine
        .dir
        .path()
        .join("sys/devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0");
    fs::write(folder.join("class"), "0x060400").unwrap();
    let config = config_with_acs();
    let port = machine.dir.path().join("sys/bus/pci/devices/0000:02:01.0/config");
    fs::write(port, config).unwrap();
    let layout = machine.layout();
    check(&layout);
    assert_eq!(layout.bands.len(), 2);
    assert!(is_in(&layout.bands[0], &layout.bands[1]), "{:?}", layout.bands);
    let (document, _) = machine.draw();
    let texts = texts(&document);
    for words in ["redirects by ACS", "pci10000:e0", "10000:e1:00.0, no driver"] {
        assert!(texts.iter().any(|text| text == words), "{words}: {texts:#?}");
    }
}

/// Returns the configuration space of a downstream port that redirects by ACS.
fn config_with_acs() -> Vec<u8> {
    let mut config = vec![0u8; 4096];
    config[0x34] = 0x40;
    config[0x40..0x43].copy_from_slice(&[0x10, 0, 0x62]);
    config[0x100..0x104].copy_from_slice(&[0x0d, 0, 0x01, 0]);
    config[0x106] = 0x1d;
    config
}

#[test]
fn empty_machine_and_unknown_functions_are_drawn() {
    let machine = Machine::new();
    check(&machine.layout());
    let (document, _) = machine.draw();
    assert!(texts(&document)
        .iter()
        .any(|text| text.contains("no device with memory to share")));
    let mut machine = Machine::new();
    machine.fake = Some(Fake::example());
    check(&machine.layout());
    let (document, _) = machine.draw();
    let texts = texts(&document);
    assert!(texts.iter().any(|text| text == "not in sysfs"), "{texts:#?}");
    assert!(texts.iter().any(|text| text == "0000:08:00.0, p2pmem"), "{texts:#?}");
}

#[test]
fn drawing_is_written_to_a_file_or_an_error_names_the_file() {
    let machine = Machine::large();
    let file = machine.dir.path().join("machine.svg");
    let (result, out, _) = machine.with(|context| draw(context, &[], &file));
    assert_eq!((result.unwrap(), out.as_str()), (Outcome::Done, ""));
    texts(&fs::read_to_string(&file).unwrap());
    let (result, ..) = machine.with(|context| draw(context, &[], &file.join("x")));
    assert!(format!("{:#}", result.unwrap_err()).contains("cannot write"));
    let (result, out, _) = machine.with(|context| {
        context.json = true;
        draw(context, &[], Path::new("-"))
    });
    assert!(result.unwrap_err().is::<UsageError>() && out.is_empty());
}
