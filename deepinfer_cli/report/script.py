"""The page's few lines of script: what the pointer is over, said in a small box. Without it the figures' own titles do the same."""

JS = """
(()=>{
const tip=document.createElement('div');tip.id='tip';document.body.append(tip);
const fmt=v=>Math.abs(v)>=1000?Math.round(v).toLocaleString('en'):Number(v.toPrecision(4)).toString();
const back=(s,p)=>{const[a,b,c,d,log]=s;const t=(p-c)/(d-c||1);return log?10**(Math.log10(a)+t*(Math.log10(b)-Math.log10(a))):a+t*(b-a)};
const nums=t=>t.split(',').map(Number);
document.querySelectorAll('svg').forEach(svg=>{
 const line=document.createElementNS('http://www.w3.org/2000/svg','line');line.setAttribute('class','cross');svg.append(line);
 const spots=[...svg.querySelectorAll('circle,rect.bar,line.mark')].map(e=>{
  const t=e.querySelector('title');const text=t?t.textContent:'';if(t)t.remove();
  e.setAttribute('aria-label',text);return{e,text,x:+e.getAttribute('cx'),y:+e.getAttribute('cy'),dot:e.tagName==='circle'}});
 const paths=[...svg.querySelectorAll('path[data-y]')].map(e=>({name:e.dataset.n,pct:e.dataset.f==='%',y:nums(e.dataset.y),
  p:e.getAttribute('d').slice(1).split(' L').map(t=>t.split(' ').map(Number))}));
 const xs=svg.dataset.x?nums(svg.dataset.x):null;let lit=null;
 const off=()=>{tip.style.opacity=0;line.style.opacity=0;if(lit)lit.classList.remove('lit');lit=null};
 svg.addEventListener('pointerleave',off);
 svg.addEventListener('pointermove',ev=>{
  const m=svg.getScreenCTM();const x=(ev.clientX-m.e)/m.a,y=(ev.clientY-m.f)/m.d;off();
  let found=spots.find(s=>!s.dot&&s.e===ev.target),near=14;
  if(!found)for(const s of spots)if(s.dot){const d=Math.hypot(s.x-x,s.y-y);if(d<near){near=d;found=s}}
  const out=[];
  if(found){lit=found.e;lit.classList.add('lit');out.push(found.text)}
  else if(xs&&paths.length&&x>=xs[2]&&x<=xs[3]){
   line.setAttribute('x1',x);line.setAttribute('x2',x);line.setAttribute('y1',12);line.setAttribute('y2',svg.viewBox.baseVal.height-44);
   line.style.opacity=1;out.push(fmt(back(xs,x))+' '+svg.dataset.xn.replace(', logarithmic',''));
   for(const p of paths){let v=null;for(const[a,b]of p.p){if(a<=x)v=b;else break}
    if(v!==null){const w=back(p.y,v);out.push(p.name+': '+(p.pct?(w*100).toFixed(1)+' %':fmt(w)))}}}
  if(!out.length)return;
  tip.textContent=out.join('\\n');tip.style.opacity=1;
  const r=tip.getBoundingClientRect();
  tip.style.left=Math.min(ev.clientX+14,innerWidth-r.width-8)+'px';tip.style.top=Math.max(8,ev.clientY-r.height-12)+'px'})})
})()
""".strip()
