// SPDX-License-Identifier: MIT OR Apache-2.0

//! The places of boxes and texts: a tree from left to right.
//!
//! A box of a bridge is as high as everything below it, so that the functions below one switch are beside one box. Devices
//! are in one column at the right. A band behind each switch connects the switch with its devices.

use std::collections::BTreeMap;

use p2pmem::PciAddr;

use crate::tree::{Node, Role};
use crate::Scene;

/// Height of a line of text.
const LINE: u32 = 16;
/// Size of the font in boxes and notes.
const FONT: u32 = 12;
/// Size of the font of the title.
const TITLE_FONT: u32 = 18;
/// Space between a box and its text.
const PADDING: u32 = 8;
/// Height of the bar that shows used memory, with the space above.
const USAGE: u32 = 12;
/// Space between boxes, one above the other.
const GAP: u32 = 18;
/// Space between the devices and the first line of a transfer, and between lines.
const LANES: u32 = 26;
const LANE: u32 = 16;
/// Width of the legend's samples.
const SAMPLE: u32 = 28;
/// Space between columns.
const COLUMN_GAP: u32 = 28;
/// Space around the drawing.
const MARGIN: u32 = 20;
/// Space between a band and the boxes in it.
const BAND: u32 = 5;
/// The least width of the drawing, for the notes.
const MIN_WIDTH: u32 = 720;
/// The most characters of a line in a box.
const MAX_CHARS: usize = 46;
/// Width of the mark of a client at the left of its box.
pub(crate) const CLIENT_MARK: u32 = 6;

/// A rectangle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rect {
    /// The left edge.
    pub x: u32,
    /// The upper edge.
    pub y: u32,
    /// The width.
    pub width: u32,
    /// The height.
    pub height: u32,
}

/// The look of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// The title of the drawing.
    Title,
    /// The name of a box or of a part.
    Name,
    /// A fact.
    Plain,
    /// Something that needs attention.
    Warning,
    /// Something about memory that was chosen.
    Chosen,
}

/// A text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    /// The left edge.
    pub x: u32,
    /// The base line.
    pub y: u32,
    /// The look.
    pub look: Look,
    /// The characters.
    pub content: String,
}

impl Text {
    /// Returns the size of the font.
    pub fn font(&self) -> u32 {
        match self.look {
            Look::Title => TITLE_FONT,
            _ => FONT,
        }
    }

    /// Returns the area of the text.
    pub fn area(&self) -> Rect {
        let font = self.font();
        Rect {
            x: self.x,
            y: self.y - font,
            width: width_of(&self.content, font),
            height: font + font / 4,
        }
    }
}

/// A box with text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextBox {
    /// The box.
    pub rect: Rect,
    /// The role of the function.
    pub role: Role,
    /// Whether the function is a client.
    pub is_client: bool,
    /// Whether a text is a warning.
    pub has_warning: bool,
    /// Whether the memory of the device was chosen for a transfer.
    pub is_chosen: bool,
    /// The texts.
    pub texts: Vec<Text>,
    /// The bar of used memory, and the width of its used part.
    pub usage: Option<(Rect, u32)>,
}

/// A horizontal line between two boxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// The left end.
    pub from: u32,
    /// The right end.
    pub to: u32,
    /// The height.
    pub y: u32,
    /// Whether a transfer passes the link.
    pub has_transfer: bool,
}

/// A vertical line beside the devices, with a horizontal line to each device between which data moves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lane {
    /// The number of the transfer in the scene.
    pub transfer: usize,
    /// The vertical line.
    pub x: u32,
    /// The horizontal lines, in descending order: height, left end, and whether data moves into the device.
    pub ends: Vec<(u32, u32, bool)>,
}

/// A drawing.
#[derive(Debug, Default)]
pub struct Layout {
    /// The width.
    pub width: u32,
    /// The height.
    pub height: u32,
    /// Areas behind switches and their devices. A band of a switch below another one comes after the other band.
    pub bands: Vec<Rect>,
    /// Links between boxes.
    pub links: Vec<Link>,
    /// Lines of transfers.
    pub lanes: Vec<Lane>,
    /// Samples of transfers' lines in the legend: number of the transfer, left end, right end, and height.
    pub samples: Vec<(usize, u32, u32, u32)>,
    /// Boxes of functions, and samples of boxes in the legend.
    pub boxes: Vec<TextBox>,
    /// Texts that are in no box.
    pub texts: Vec<Text>,
}

/// Returns the width of a text in a font with characters of one width, rounded up.
fn width_of(text: &str, font: u32) -> u32 {
    // Fonts differ: the characters of DejaVu Sans Mono have 0.602 of the font's size, those of others less. Characters
    // beyond ASCII can have the width of two.
    let columns: u32 = text.chars().map(|c| if c.is_ascii() { 1 } else { 2 }).sum();
    (columns * font * 62).div_ceil(100)
}

/// Returns a line of a box: shortened, without characters that XML or a line cannot have.
fn line(text: &str) -> String {
    let clean = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    let mut short: String = text.chars().map(clean).take(MAX_CHARS).collect();
    if text.chars().count() > MAX_CHARS {
        short.pop();
        short.push('…');
    }
    short
}

/// Returns the lines of a node with their looks.
fn lines(node: &Node) -> Vec<(Look, String)> {
    let own = node.lines.iter().enumerate();
    let mut all: Vec<_> = own
        .map(|(n, text)| (if n == 0 { Look::Name } else { Look::Plain }, line(text)))
        .collect();
    all.extend(node.warning.map(|warning| (Look::Warning, line(warning))));
    if !node.chosen_for.is_empty() {
        let text = format!("chosen for {}", node.chosen_for.join(", "));
        all.push((Look::Chosen, line(&text)));
    }
    all
}

/// Returns the height of a box without regard to what is below the node.
fn own_height(node: &Node) -> u32 {
    let lines = u32::try_from(lines(node).len()).unwrap_or(u32::MAX);
    let usage = if node.usage.is_some() { USAGE } else { 0 };
    lines * LINE + 2 * PADDING + usage
}

/// Returns the height of a node with all below it.
fn height(node: &Node) -> u32 {
    own_height(node).max(stack(&node.children))
}

/// Returns the height of nodes, one below the other.
fn stack(nodes: &[Node]) -> u32 {
    let gaps = u32::try_from(nodes.len().saturating_sub(1)).unwrap_or(0) * GAP;
    nodes.iter().map(height).sum::<u32>() + gaps
}

fn box_width(node: &Node) -> u32 {
    let widest = lines(node)
        .iter()
        .map(|(_, text)| width_of(text, FONT))
        .max()
        .unwrap_or(0);
    widest + 2 * PADDING + CLIENT_MARK
}

fn is_device(role: Role) -> bool {
    matches!(role, Role::Provider | Role::Memory | Role::Client)
}

/// The widths of the columns: one for each level of bridges, and the last one for devices.
#[derive(Default)]
struct Columns {
    bridges: Vec<u32>,
    devices: u32,
}

impl Columns {
    fn measure(&mut self, nodes: &[Node], level: usize) {
        for node in nodes {
            let width = box_width(node);
            if is_device(node.role) {
                self.devices = self.devices.max(width);
                continue;
            }
            if self.bridges.len() <= level {
                self.bridges.resize(level + 1, 0);
            }
            self.bridges[level] = self.bridges[level].max(width);
            self.measure(&node.children, level + 1);
        }
    }

    /// Returns the left edge of a column of bridges.
    fn bridge_x(&self, level: usize) -> u32 {
        let before = self.bridges.iter().take(level);
        MARGIN + before.map(|width| width + COLUMN_GAP).sum::<u32>()
    }

    /// Returns the left edge of the column of devices.
    fn device_x(&self) -> u32 {
        self.bridge_x(self.bridges.len())
    }

    fn right(&self) -> u32 {
        self.device_x() + self.devices
    }
}

/// Lays a tree out, with notes above and a legend below.
pub(crate) fn layout(roots: &[Node], scene: &Scene) -> Layout {
    let mut columns = Columns::default();
    columns.measure(roots, 0);
    let mut layout = Layout {
        width: (columns.right() + lanes_width(scene) + MARGIN).max(MIN_WIDTH),
        ..Layout::default()
    };
    let mut y = MARGIN + TITLE_FONT;
    layout.text(MARGIN, y, Look::Title, "PCI topology".into());
    y += 8;
    let chars = (layout.width - 2 * MARGIN) * 100 / (FONT * 62);
    for note in &scene.notes {
        for wrapped in wrap(&line_of_any_length(note), chars as usize) {
            y += LINE;
            layout.text(MARGIN, y, Look::Plain, wrapped);
        }
    }
    y += 2 * GAP;
    if roots.is_empty() {
        y += LINE;
        let none = "This machine has no device with memory to share, and no client.";
        layout.text(MARGIN, y, Look::Plain, none.into());
        y += GAP;
    }
    let mut places = BTreeMap::new();
    for root in roots {
        layout.place(root, &columns, 0, y, &mut places);
        y += height(root) + 2 * GAP;
    }
    layout.transfers(scene, columns.right(), &places);
    layout.legend(y, scene);
    layout
}

/// Returns the width of the lines of all transfers: two for each.
fn lanes_width(scene: &Scene) -> u32 {
    let count = u32::try_from(scene.transfers.len()).unwrap_or(0);
    if count == 0 {
        0
    } else {
        LANES + 2 * count * LANE
    }
}

/// Returns a text without characters that XML or a line cannot have.
fn line_of_any_length(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

/// Divides a text at blanks into lines of at most `chars` characters. A longer word has a line of its own, shortened.
fn wrap(text: &str, chars: usize) -> Vec<String> {
    let mut all = vec![String::new()];
    for word in text.split_whitespace() {
        let word: String = word.chars().take(chars).collect();
        let used = all.last().map_or(0, |line| line.chars().count());
        if used > 0 && used + 1 + word.chars().count() > chars {
            all.push(String::new());
        }
        if let Some(line) = all.last_mut() {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(&word);
        }
    }
    all
}

impl Layout {
    fn text(&mut self, x: u32, y: u32, look: Look, content: String) {
        self.texts.push(Text { x, y, look, content });
    }

    /// Places a node and all below it. Returns the box of the node.
    fn place(
        &mut self,
        node: &Node,
        columns: &Columns,
        level: usize,
        top: u32,
        places: &mut BTreeMap<PciAddr, Rect>,
    ) -> Rect {
        let height = height(node);
        let (x, width) = if is_device(node.role) {
            (columns.device_x(), columns.devices)
        } else {
            (columns.bridge_x(level), columns.bridges[level])
        };
        let rect = Rect {
            x,
            y: top,
            width,
            height,
        };
        if node.role == Role::Switch {
            self.bands.push(Rect {
                x: x - BAND,
                y: top - BAND,
                width: columns.right() - x + 2 * BAND,
                height: height + 2 * BAND,
            });
        }
        self.boxes.push(text_box(node, rect));
        places.extend(node.addr.map(|addr| (addr, rect)));
        // What is below is in the middle of a box that is higher.
        let mut y = top + (height - stack(&node.children)) / 2;
        for child in &node.children {
            let place = self.place(child, columns, level + 1, y, places);
            self.links.push(Link {
                from: x + width,
                to: place.x,
                y: place.y + place.height / 2,
                has_transfer: child.has_transfer,
            });
            y += place.height + GAP;
        }
        rect
    }

    /// Places the lines of transfers at the right of the devices, whose column ends at `right`.
    fn transfers(&mut self, scene: &Scene, right: u32, places: &BTreeMap<PciAddr, Rect>) {
        // Of each transfer, one line goes into the memory, and one out of it: the devices, and whether data moves into them.
        let lanes = scene.transfers.iter().enumerate().flat_map(|(number, transfer)| {
            let into = transfer.sources.iter().map(|source| (*source, false));
            let out = transfer.targets.iter().map(|target| (*target, true));
            let into: Vec<_> = into.chain([(transfer.memory, true)]).collect();
            let out: Vec<_> = [(transfer.memory, false)].into_iter().chain(out).collect();
            [(number, into), (number, out)]
        });
        let lanes: Vec<_> = lanes.collect();
        let mut ends_of: BTreeMap<PciAddr, u32> = BTreeMap::new();
        for (addr, _) in lanes.iter().flat_map(|(_, devices)| devices) {
            *ends_of.entry(*addr).or_default() += 1;
        }
        let mut used: BTreeMap<PciAddr, u32> = BTreeMap::new();
        let mut x = right + LANES;
        for (transfer, devices) in lanes {
            let ends = devices.into_iter().filter_map(|(addr, into)| {
                let rect = places.get(&addr)?;
                let number = used.entry(addr).or_default();
                *number += 1;
                // The ends at one device are apart.
                let y = rect.y + rect.height * *number / (ends_of.get(&addr).copied().unwrap_or(1) + 1);
                Some((y, rect.x + rect.width, into))
            });
            let mut ends: Vec<_> = ends.collect();
            ends.sort_unstable();
            // The number stands above the first of the two lines.
            if let (Some((y, ..)), true) = (ends.first(), self.lanes.len() % 2 == 0) {
                let number = scene.transfers[transfer].number.to_string();
                self.text(x - 4, y - 5, Look::Name, number);
            }
            self.lanes.push(Lane { transfer, x, ends });
            x += LANE;
        }
    }

    /// Places what the legend says about transfers. Returns the height below.
    fn legend_of_transfers(&mut self, top: u32, scene: &Scene) -> u32 {
        let mut y = top;
        let left = MARGIN + SAMPLE + PADDING;
        let chars = (self.width - left - MARGIN) * 100 / (FONT * 62);
        for (number, transfer) in scene.transfers.iter().enumerate() {
            self.samples.push((number, MARGIN, MARGIN + SAMPLE, y + LINE / 2 - 1));
            for wrapped in wrap(&line_of_any_length(&transfer.about), chars as usize) {
                self.text(left, y + FONT - 1, Look::Plain, wrapped);
                y += LINE;
            }
            y += 4;
        }
        y
    }

    /// Places the legend below `top`, and sets the height of the drawing.
    fn legend(&mut self, top: u32, scene: &Scene) {
        const ENTRIES: [(Role, &str); 5] = [
            (
                Role::Provider,
                "provider: p2pmem hands its memory out; the bar shows the used part",
            ),
            (
                Role::Memory,
                "memory that is not a provider's, with the interface that can hand it out",
            ),
            (
                Role::Client,
                "client: uses memory of other devices by DMA (mark at the left edge)",
            ),
            (
                Role::Switch,
                "PCIe switch: traffic between devices in its area stays in the switch",
            ),
            (
                Role::Port,
                "switch port that redirects traffic to the root complex by ACS",
            ),
        ];
        let mut y = top;
        self.text(MARGIN, y + FONT, Look::Name, "Legend".into());
        y = self.legend_of_transfers(y + LINE + 4, scene);
        let chosen = "memory that was chosen for a transfer; lines at the right show where data moves";
        let chosen = (!scene.transfers.is_empty()).then_some((Role::Provider, chosen, true));
        let entries = ENTRIES.map(|(role, about)| (role, about, false));
        for (role, about, is_chosen) in chosen.into_iter().chain(entries) {
            let rect = Rect {
                x: MARGIN,
                y,
                width: SAMPLE,
                height: LINE - 2,
            };
            self.boxes.push(TextBox {
                rect,
                role,
                is_client: role == Role::Client,
                has_warning: role == Role::Port,
                is_chosen,
                texts: Vec::new(),
                usage: None,
            });
            self.text(MARGIN + SAMPLE + PADDING, y + FONT - 1, Look::Plain, about.into());
            y += LINE + 4;
        }
        self.height = y + MARGIN;
    }
}

fn text_box(node: &Node, rect: Rect) -> TextBox {
    let lines = lines(node);
    let left = rect.x + PADDING + CLIENT_MARK;
    // A high box has its text in the middle.
    let first = rect.y + (rect.height - own_height(node)) / 2 + PADDING;
    let texts = lines.into_iter().zip(1..).map(|((look, content), n)| Text {
        x: left,
        y: first + n * LINE - 4,
        look,
        content,
    });
    let texts: Vec<_> = texts.collect();
    let usage = node.usage.map(|(used, size)| {
        let bar = Rect {
            x: left,
            y: rect.y + rect.height - PADDING - USAGE + 4,
            width: rect.width - 2 * PADDING - CLIENT_MARK,
            height: USAGE - 4,
        };
        let filled = u128::from(bar.width) * u128::from(used.min(size));
        let filled = filled.checked_div(u128::from(size)).unwrap_or(0);
        (bar, u32::try_from(filled).unwrap_or(bar.width))
    });
    TextBox {
        rect,
        role: node.role,
        is_client: node.is_client,
        has_warning: node.warning.is_some(),
        is_chosen: !node.chosen_for.is_empty(),
        texts,
        usage,
    }
}
